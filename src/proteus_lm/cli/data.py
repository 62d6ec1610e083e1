"""`proteus prepare`: text to token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from proteus_lm.cli.common import app, path_or_name


@app.command
def prepare(
    *,
    source: str,
    tokenizer: str,
    out: Path,
    field: str = "text",
    separator: str | None = None,
    errors: Literal["strict", "replace"] = "strict",
    hub_config: str | None = None,
    hub_split: str = "train",
    max_documents: int | None = None,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    shard_tokens: int = 100_000_000,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Turn text into token shards to train on.

    Interrupted work goes on where it stopped when the same command is given again; finished work is
    compared with its SHA-256 and used as it is.
    Example: proteus prepare --source pydoc --tokenizer byte --out runs/demo/data

    Args:
        source: pydoc (the documentation inside this Python), a text file, a folder, JSON lines (plain or compressed), Parquet, or a
            data set's name on the hub.
        tokenizer: byte (built in), a tokenizer.json, a folder that holds one, or the name of a model on the hub.
        out: Folder to write: manifest.json, tokenizer.json, train/, validation/.
        field: Field of a row that holds the text (JSON lines, Parquet, hub).
        separator: Text that separates documents inside a text file; without it a file is one document.
        errors: strict stops at bytes that are not UTF-8 and says where; replace puts U+FFFD there.
        hub_config: Configuration of a data set on the hub.
        hub_split: Split of a data set on the hub.
        max_documents: Stop after so many documents.
        validation_fraction: Share of documents kept for validation.
        split_seed: Another seed, another choice of validation documents.
        shard_tokens: A shard is closed by the document that reaches this many tokens.
        dtype: Type of the stored ids; auto takes the smallest that holds the vocabulary.
        workers: Processes that tokenize; 0 works in this one; by default chosen by the size of the source.
        overwrite: Replace prepared data that is there already.
    """
    from proteus_lm.data.prepare import prepare as prepare_data

    manifest = prepare_data(
        path_or_name(source),
        tokenizer,
        out,
        field=field,
        separator=separator,
        errors=errors,
        hub_config=hub_config,
        hub_split=hub_split,
        max_documents=max_documents,
        validation_fraction=validation_fraction,
        split_seed=split_seed,
        shard_tokens=shard_tokens,
        dtype=dtype,
        workers=workers,
        overwrite=overwrite,
    )
    for name, split in manifest.splits.items():
        sizes = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.bytes:,} bytes of text"
        print(f"{name:<10} {sizes}; the longest has {split.longest_document:,} tokens")
    print(f"prepared   {out}")
