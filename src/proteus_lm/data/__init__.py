"""Text into token shards (prepare), shards into batches (loader): an index is the whole position of a run."""
