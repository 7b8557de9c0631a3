"""Training rows: chat templates, labels, packing, preparation and inspection."""

from typing import TYPE_CHECKING

from .. import lazy_exports
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

if TYPE_CHECKING:
    from .collator import DFlashCollator
    from .dataset import (
        PREPARED_COLUMNS,
        TOO_LONG,
        UNSUPERVISED,
        PreparedStream,
        content_id,
        prepare_dataset,
        prepare_row,
        prepare_rows,
    )
    from .packing import pack_dataset
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            ".collator": ["DFlashCollator"],
            ".dataset": [
                "PREPARED_COLUMNS",
                "TOO_LONG",
                "UNSUPERVISED",
                "PreparedStream",
                "content_id",
                "prepare_dataset",
                "prepare_row",
                "prepare_rows",
            ],
            ".packing": ["pack_dataset"],
        },
    )
