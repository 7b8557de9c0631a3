"""Training rows: chat templates, labels, packing, preparation and inspection."""

from .dataset import (
    MAX_LENGTH,
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
