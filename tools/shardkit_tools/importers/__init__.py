"""Importers: each turns one kind of source into samples.

protocol        what the build engine asks of an importer
options         what a user may say about a source beyond its path
source_files    listing and reading the files of a source
remote_files    the same behind a URL
line_ranges     files of lines, cut into ranges
json_types      field types of JSON rows
strict_json     JSON without NaN and without keys given twice
tar_members     a strict reader of foreign tars
member_values   WebDataset's extensions → fields and values
arrow_values    Arrow columns → fields
mds_values      columns of MDS → fields
folder, text, json_lines, csv, numpy_rows, webdataset, parquet, arrow, huggingface, mds   the importers
conformance     what every importer must keep, as a function for tests
detection       which importer a source needs
"""

from __future__ import annotations

from shardkit_tools.importers.detection import IMPORTERS, detect, open_source
from shardkit_tools.importers.options import ImportOptions, parse_field_types
from shardkit_tools.importers.protocol import Importer, SourceFailure, SourceFile, SourceSample, SourceTask

__all__ = [
    "IMPORTERS",
    "ImportOptions",
    "Importer",
    "SourceFailure",
    "SourceFile",
    "SourceSample",
    "SourceTask",
    "detect",
    "open_source",
    "parse_field_types",
]
