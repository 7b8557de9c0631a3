"""Default values of regeneration. No torch, so that the command shows its help at once."""

BATCH_SIZE = 64  # completions that the local backend writes at a time
CONCURRENCY = 32  # requests to a server at a time
TIMEOUT_S = 600.0  # longest wait for one completion of a server
FORMATS = ("parquet", "jsonl")
ROWS_PER_SHARD = 1000
