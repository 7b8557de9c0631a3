"""Training rows: chat templates, labels, packing, preparation and inspection."""

from .dataset import (
    MAX_LENGTH,
    PREPARED_COLUMNS,
    TOO_LONG,
    UNSUPERVISED,
    DFlashCollator,
    PreparedStream,
    content_id,
    prepare_row,
    prepare_rows,
)

__all__ = [
    "DFlashCollator",
    "MAX_LENGTH",
    "PREPARED_COLUMNS",
    "PreparedStream",
    "TOO_LONG",
    "UNSUPERVISED",
    "content_id",
    "prepare_row",
    "prepare_rows",
]
