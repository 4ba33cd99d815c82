"""Data: tokenizers, indexed datasets, the order of samples, and the loader. Imports numpy, never torch."""

from megackpt.data.build import Datasets, SampleCounts, build_datasets, build_mock_datasets
from megackpt.data.dataset import Batch, Sample, SampleDataset, collate
from megackpt.data.gpt_dataset import GPTDataset, SampleFormat
from megackpt.data.indexed import IndexedDataset
from megackpt.data.indexed_writer import IndexedWriter
from megackpt.data.loader import MicroBatchLoader
from megackpt.data.mock import MockDataset
from megackpt.data.position import DataPosition, resume_message
from megackpt.data.sampler import micro_batch_samples
from megackpt.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "Batch",
    "DataPosition",
    "Datasets",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "MicroBatchLoader",
    "MockDataset",
    "Sample",
    "SampleCounts",
    "SampleDataset",
    "SampleFormat",
    "Tokenizer",
    "build_datasets",
    "build_mock_datasets",
    "build_tokenizer",
    "collate",
    "micro_batch_samples",
    "resume_message",
]
