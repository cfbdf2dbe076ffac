"""The start-up plan: what it counts, what it refuses and what it advises; control groups of both versions."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_model import write_tiny_model

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.config import load_config
from treeserve_engine.kv_cache import KvCache
from treeserve_engine.loading import load_model
from treeserve_engine.memory_limits import available_bytes, resident_bytes
from treeserve_engine.memory_plan import MemoryPlan, ModelSizes
from treeserve_engine.precision import Precision
from treeserve_engine.weight_files import parameter_count
from treeserve_engine.weights import load_tensors
from treeserve_kernels.cpu.library import is_built

MB, GB = 10**6, 10**9
FLOAT32 = Precision("float32", "float32", False, "")
BFLOAT16 = Precision("bfloat16", "bfloat16", False, "")
TWIN = Precision("int8", "bfloat16", False, "")
SIZES = ModelSizes(
    parameters=100 * MB, embedding=30 * MB, is_tied=True, vocab_size=50_000, widest=1500, num_layers=10, num_kv_heads=4,
    head_dim=64,
)  # fmt: skip


def native(kv_dtype: str) -> Precision:
    return Precision("int8", kv_dtype, True, "")


def plan_of(precision: Precision, kv_tokens: int = 16_000, **changes: Any) -> MemoryPlan:
    options = {"device": "cpu", "num_blocks": kv_tokens // 16, "block_size": 16, "rows": 64, "base": 100 * MB}
    return MemoryPlan.of(SIZES, precision, **{**options, **changes})


def test_sizes_are_read_from_the_checkpoint(tiny_model: Path) -> None:
    config, tensors = load_config(tiny_model), load_tensors(tiny_model)
    sizes = ModelSizes.of(tiny_model)
    assert sizes.parameters == parameter_count(tiny_model) == sum(tensors[name].numel() for name in tensors)
    assert sizes.embedding == tensors["model.embed_tokens.weight"].numel()
    assert (sizes.vocab_size, sizes.num_layers, sizes.num_kv_heads) == (config.vocab_size, 2, 2)
    assert (sizes.head_dim, sizes.widest, sizes.is_tied) == (config.head_dim, config.intermediate_size, False)


@pytest.mark.parametrize(
    "raw",
    [
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99},  # GPT-2's names
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99},
        {"text_config": {"d_model": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 99}},
    ],
)
def test_other_families_name_their_sizes_otherwise(tiny_model: Path, tmp_path: Path, raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    sizes = ModelSizes.of(tmp_path)
    assert (sizes.vocab_size, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim) == (99, 3, 4, 16)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"vocab_size": 10**12}, {"hidden_size": 10**9}])
def test_sizes_that_cannot_be_are_refused(tiny_model: Path, tmp_path: Path, changes: dict[str, int]) -> None:
    raw = json.loads((tiny_model / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(tiny_model / "model.safetensors")
    with pytest.raises(InvalidArgumentError, match="cannot be"):
        ModelSizes.of(tmp_path)


def test_weights_count_what_a_pass_reads() -> None:
    assert SIZES.weight_bytes(native("bfloat16"), "cpu") == 100 * MB
    assert SIZES.weight_bytes(BFLOAT16, "cuda") == 200 * MB
    assert SIZES.weight_bytes(FLOAT32, "cpu") == 4 * 130 * MB  # the tied output layer has a layout of its own
    assert SIZES.weight_bytes(TWIN, "cpu") == 4 * 130 * MB
    untied = ModelSizes(**{**vars(SIZES), "is_tied": False})
    assert untied.weight_bytes(native("bfloat16"), "cpu") == 70 * MB
    assert untied.weight_bytes(FLOAT32, "cpu") == 400 * MB


@pytest.mark.skipif(not is_built(), reason="the native decoder is not built")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_kv_of_the_native_decoder_is_counted_to_the_byte(tiny_model: Path, kv_dtype: str, block_size: int) -> None:
    model = load_model(tiny_model, dtype="int8", kv_dtype=kv_dtype, device="cpu", threads=1)
    counted = ModelSizes.of(tiny_model).kv_bytes(native(kv_dtype), 5, block_size)
    assert counted == model.new_kv(5, block_size).nbytes


@pytest.mark.parametrize(("precision", "dtype"), [(FLOAT32, torch.float32), (BFLOAT16, torch.bfloat16)])
def test_kv_of_torch_is_counted_to_the_byte(tiny_model: Path, precision: Precision, dtype: torch.dtype) -> None:
    cache = KvCache.allocate(load_config(tiny_model), 24, dtype, torch.device("cpu"))
    assert ModelSizes.of(tiny_model).kv_bytes(precision, 3, 8) == cache.nbytes


def test_a_plan_that_fits_says_nothing() -> None:
    plan = plan_of(native("bfloat16"))
    assert plan.total == plan.weights + plan.kv + plan.scratch + plan.base
    plan.check(plan.total)
    with pytest.raises(InvalidArgumentError):
        plan.check(plan.total - 1)


def test_what_is_advised_fits() -> None:
    plan = plan_of(native("bfloat16"), kv_tokens=160_000)
    with pytest.raises(InvalidArgumentError) as refused:
        plan.check(GB)
    message = str(refused.value)
    assert message.startswith("kv_tokens: needs 1.9 GB of memory: weights 100 MB, kv 1.6 GB, scratch")
    assert "1.0 GB available" in message and message.endswith("or use kv_dtype int8")
    (tokens,) = re.findall(r"lower kv_tokens to at most (\d+)", message)
    plan_of(native("bfloat16"), kv_tokens=int(tokens)).check(GB)
    with pytest.raises(InvalidArgumentError):
        plan_of(native("bfloat16"), kv_tokens=int(tokens) + 32).check(GB)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        (native("float32"), "or use kv_dtype bfloat16"),
        (native("int8"), r"at most \d+$"),
        (FLOAT32, "or use dtype int8 or bfloat16"),
        (BFLOAT16, "or use dtype int8"),
    ],
)
def test_what_takes_less_is_named(precision: Precision, advice: str) -> None:
    with pytest.raises(InvalidArgumentError, match=advice):
        plan_of(precision, kv_tokens=10**7).check(4 * GB)


def test_a_model_that_never_fits_is_told_so() -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory: needs .* the model does not fit: use dtype"):
        plan_of(FLOAT32).check(500 * MB)


def test_evicted_kv_is_counted_where_it_lies() -> None:
    plan, without = plan_of(native("int8"), spilled=300 * MB), plan_of(native("int8"))
    assert plan.total - without.total == 300 * MB
    assert plan.table()["spilled_kv"] == "300 MB" and "spilled_kv" not in without.table()
    assert plan_of(BFLOAT16, device="cuda", spilled=300 * MB).total == plan_of(BFLOAT16, device="cuda").total
    with pytest.raises(InvalidArgumentError, match=r"lower kv_tokens to at most \d+, or lower kv_host_mb$"):
        plan.check(plan.total - 1)
    with pytest.raises(InvalidArgumentError, match=r"does not fit: lower kv_host_mb or use dtype int8 or bfloat16"):
        plan_of(FLOAT32, spilled=300 * MB).check(500 * MB)


def test_torch_is_counted_before_it_is_imported() -> None:
    measured = plan_of(native("bfloat16"), base=None).base
    assert measured == pytest.approx(resident_bytes(), rel=0.2)
    assert plan_of(FLOAT32, base=None).base - measured > 200 * MB
    assert plan_of(BFLOAT16, device="cuda", base=None).base == 0


# --- Limits


def machine(tmp_path: Path, *, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A root with 8 GB available, and a process that holds 100 pages, 40 of them files'."""
    contents = {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/statm": "5000 100 40 1 0 90 0\n",
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


OWN = 60 * os.sysconf("SC_PAGE_SIZE")
STAT = "anon 1\ninactive_file 300\nactive_file 200\ntotal_inactive_file 700\ntotal_active_file 100\n"


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(root=machine(tmp_path, cgroup="0::/\n")) == 8_192_000_000 + OWN


def test_version_2_with_dropped_pages_counted_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pods/one"
    files = {f"{group}/memory.max": "10000\n", f"{group}/memory.current": "4000\n", f"{group}/memory.stat": STAT}
    assert available_bytes(root=machine(tmp_path, cgroup="0::/pods/one\n", files=files)) == 10_000 - 3500 + OWN


def test_a_limit_further_up_counts_too(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pods/one/memory.max": "max\n",
        "sys/fs/cgroup/pods/one/memory.current": "1\n",
        "sys/fs/cgroup/pods/memory.max": "5000\n",
        "sys/fs/cgroup/pods/memory.current": "4000\n",
    }
    assert available_bytes(root=machine(tmp_path, cgroup="0::/pods/one\n", files=files)) == 1000 + OWN


def test_inside_a_container_its_group_is_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "9000\n", "sys/fs/cgroup/memory.current": "2000\n"}
    assert available_bytes(root=machine(tmp_path, cgroup="0::/somewhere/else\n", files=files)) == 7000 + OWN


def test_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        f"{group}/memory.limit_in_bytes": "10000\n",
        f"{group}/memory.usage_in_bytes": "4000\n",
        f"{group}/memory.stat": STAT,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
    }
    cgroup = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert available_bytes(root=machine(tmp_path, cgroup=cgroup, files=files)) == 10_000 - 3200 + OWN


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="device: cuda:99 cannot be used"):
        available_bytes("cuda:99")


def test_this_machine_has_some() -> None:
    assert resident_bytes() < available_bytes()


def test_a_verifier_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treeserve_verifier import main
    from treeserve_verifier.config import VerifierConfig

    folder = write_tiny_model(tmp_path / "model")
    config = VerifierConfig(model_folder=folder, model_name="tiny", dtype="float32", max_context_tokens=256)
    monkeypatch.setattr(main, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(main, "load_model", lambda *_args, **_kwargs: pytest.fail("loaded"))
    with pytest.raises(InvalidArgumentError, match=r"needs .* available"):
        main.load_engine(config)
