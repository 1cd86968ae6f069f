"""Fixtures of all tests; builders are in `helpers/builders.py`."""

import os

import pytest
import torch
from builders import VOCABULARY, build_model


@pytest.fixture(scope="session", autouse=True)
def own_extensions(tmp_path_factory):
    """DeepSpeed compiles an operator under a lock that a killed process leaves behind, and waits for it for ever."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch_extensions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        yield


@pytest.fixture
def tiny_model():
    return build_model()


@pytest.fixture
def batch():
    """Token ids and attention mask `(4, 12)`, the first rows left-padded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, len(VOCABULARY), (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
