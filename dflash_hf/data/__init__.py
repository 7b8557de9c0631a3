"""Training rows: chat templates, labels, packing, preparation and inspection."""

from .dataset import (
    PREPARED_COLUMNS,
    TOO_LONG,
    UNSUPERVISED,
    DFlashCollator,
    PreparedStream,
    content_id,
    pack_dataset,
    prepare_dataset,
    prepare_row,
    prepare_rows,
)
from .settings import MAX_LENGTH

__all__ = [
    "MAX_LENGTH",
    "PREPARED_COLUMNS",
    "TOO_LONG",
    "UNSUPERVISED",
    "DFlashCollator",
    "PreparedStream",
    "content_id",
    "pack_dataset",
    "prepare_dataset",
    "prepare_row",
    "prepare_rows",
]
