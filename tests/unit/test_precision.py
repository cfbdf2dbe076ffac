"""Which number formats a model gets, and which combinations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine import precision as module
from treeserve_engine.loading import load_model
from treeserve_engine.precision import choose_precision

LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return tmp_path


@pytest.fixture(params=[True, False], ids=["built", "not-built"])
def is_built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(module, "_native_is_built", lambda: request.param)
    return bool(request.param)


def test_auto_is_int8_where_the_native_decoder_runs_the_model(tmp_path: Path, is_built: bool) -> None:
    chosen = choose_precision(folder_of(tmp_path), "auto", "auto", "cpu")
    expected = ("int8", "bfloat16", True) if is_built else ("float32", "float32", False)
    assert (chosen.dtype, chosen.kv_dtype, chosen.is_native) == expected
    assert ("not built" in chosen.reason) != is_built


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"rope_scaling": {"rope_type": "yarn", "factor": 2}}])
def test_auto_is_float32_for_a_model_the_native_decoder_does_not_run(
    tmp_path: Path, is_built: bool, changes: Any
) -> None:
    chosen = choose_precision(folder_of(tmp_path, **changes), "auto", "auto", "cpu")
    assert (chosen.dtype, chosen.kv_dtype) == ("float32", "float32")
    assert "is not supported" in chosen.reason


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_auto_is_bfloat16_on_a_gpu(tmp_path: Path, is_built: bool, device: str) -> None:
    chosen = choose_precision(folder_of(tmp_path), "auto", "auto", device)
    assert (chosen.dtype, chosen.kv_dtype, chosen.is_native) == ("bfloat16", "bfloat16", False)


def test_what_is_named_is_taken(tmp_path: Path, is_built: bool) -> None:
    folder = folder_of(tmp_path)
    for dtype, kv_dtype, expected in (
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", "auto", "bfloat16"),
        ("int8", "float32", "float32"),
    ):
        chosen = choose_precision(folder, dtype, kv_dtype, "cpu")
        assert (chosen.dtype, chosen.kv_dtype) == (dtype, expected)
        assert chosen.is_native == (dtype == "int8" and is_built)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "device", "field", "reason"),
    [
        ("float16", "auto", "cpu", "dtype", "'float16' is not one of auto, int8"),
        ("auto", "fp8", "cpu", "kv_dtype", "'fp8' is not one of"),
        ("int8", "auto", "cuda", "dtype", "CPUs, not on cuda"),
        ("float32", "bfloat16", "cpu", "kv_dtype", "bfloat16 beside float32"),
        ("bfloat16", "int8", "cuda", "kv_dtype", "int8 beside bfloat16"),
        ("auto", "auto", "tpu:0", "device", "'tpu:0' is neither cpu nor cuda"),
    ],
)
def test_what_does_not_exist_is_refused(
    tmp_path: Path, is_built: bool, dtype: str, kv_dtype: str, device: str, field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as refused:
        choose_precision(folder_of(tmp_path), dtype, kv_dtype, device)
    assert refused.value.field == field


def test_int8_keys_and_values_need_the_native_decoder(tmp_path: Path, is_built: bool) -> None:
    folder = folder_of(tmp_path)
    if is_built:
        assert choose_precision(folder, "int8", "int8", "cpu").kv_dtype == "int8"
    else:
        with pytest.raises(InvalidArgumentError, match="kv_dtype: int8 needs the native decoder"):
            choose_precision(folder, "int8", "int8", "cpu")


def test_int8_is_refused_for_other_families_with_the_reason(tmp_path: Path, is_built: bool) -> None:
    with pytest.raises(InvalidArgumentError, match=r"int8 is not for this model: .*'gpt2'"):
        choose_precision(folder_of(tmp_path, model_type="gpt2"), "int8", "auto", "cpu")


def test_what_the_native_decoder_refuses_is_the_operators_error(tiny_model: Path, tmp_path: Path) -> None:
    if not module._native_is_built():
        pytest.skip("the native decoder is not built here")
    with pytest.raises(InvalidArgumentError, match="threads 100000"):
        load_model(tiny_model, dtype="int8", device="cpu", threads=100_000, cache_dir=tmp_path)


def test_each_choice_loads_its_own_implementation(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(dtype: str) -> str:
        return type(load_model(tiny_model, dtype=dtype, device="cpu", threads=1, cache_dir=tmp_path)).__name__

    assert loaded("float32") == "LlamaModel"
    if module._native_is_built():
        assert loaded("int8") == "NativeModel"
    monkeypatch.setattr(module, "_native_is_built", lambda: False)
    with capture_logs() as logs:
        assert loaded("int8") == "LlamaModel"
    assert any("slower" in line["event"] and line["log_level"] == "warning" for line in logs)
