"""The compile report: it compiles what the launchers launch, and it reads machine code right."""

import ast
import importlib
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from test_imports import ROOT, TRITON_FILES

from fgrpo_kernels import PolicyLossConfig, triton_linear_stats, triton_rows
from fgrpo_kernels.head import LinearHead
from fgrpo_kernels.linear_head import HeadRows
from fgrpo_kernels.surrogates import PolicyRows

sys.path.append(str(ROOT / "benchmarks"))
machine_code, compile_report = map(importlib.import_module, ("machine_code", "compile_report"))

TARGETS = compile_report.TARGETS
NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16"}
NAMES |= {torch.float16: "fp16", torch.int64: "i64"}
VOCABULARIES = (16, 1008, 1024, 1040, 4096, 4111, 50257)


class Recorder:
    """In a kernel's place: keeps what it was launched with, by parameter."""

    def __init__(self, kernel):
        self.arg_names, self.launches = kernel.arg_names, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches.append(dict(zip(self.arg_names, args, strict=False)) | kwargs)

        return launch


def record(monkeypatch, module):
    recorders = {}
    for name in vars(module):
        if name.endswith("_kernel"):
            recorders[name] = Recorder(getattr(module, name))
    for name, recorder in recorders.items():
        monkeypatch.setattr(module, name, recorder)
    return recorders


def choices(launched):
    """(parameter, choice) of everything that a launch compiles in."""
    found = set()
    for name, value in launched.items():
        if isinstance(value, torch.Tensor):
            found.add((name, NAMES[value.dtype]))
        elif name.isupper() or name.startswith("num_") or name == "enable_fp_fusion":
            found.add((name, int(value)))
    return found


def reported(case):
    kernel = getattr(compile_report.MODULES[case.module], case.kernel)
    pointers = {
        name: case.pointers.get(name, case.pointers["*"])
        for name in kernel.arg_names
        if name.endswith("_ptr")
    }
    values = {name: int(value) for name, value in {**case.constants, **case.options}.items()}
    return set({**pointers, **values}.items())


def assert_same_choices(recorders, cases):
    """Every choice of a launch is in the report and the other way round, and so is every pair of
    choices, which is what the report promises."""
    for name, recorder in recorders.items():
        launched = [choices(launch) for launch in recorder.launches]
        compiled = [reported(case) for case in cases if case.kernel == name]
        assert launched and compiled, name
        assert set().union(*launched) == set().union(*compiled), name

        def pairs(sets):
            return {pair for values in sets for pair in itertools.combinations(sorted(values), 2)}

        assert pairs(launched) == pairs(compiled), name


def launch_rows(vocab, dtype, e_dtype, flags):
    logits = torch.zeros(2, vocab, dtype=dtype)
    out, ids, numbers = logits.to(e_dtype), torch.zeros(2, dtype=torch.int64), logits[:, 0]
    surrogate, kl, correction, dual_clip, entropy_coef, has_old, softcap = flags
    head = LinearHead(torch.zeros(vocab, 1, dtype=e_dtype), None, e_dtype, logit_softcap=softcap)
    stats = triton_rows.row_statistics(logits, ids, head, keep_logits=True)
    dentropy = numbers if entropy_coef else None
    triton_rows.row_gradient(logits, stats, numbers, dentropy, head, out)
    config = PolicyLossConfig(
        surrogate=surrogate,
        kl_coef=0.1 if kl else 0.0,
        kl_estimator=kl or "k3",
        rollout_correction=correction,
        dual_clip=dual_clip,
        entropy_coef=entropy_coef,
    )
    rows = PolicyRows(
        mask=torch.ones(2, dtype=torch.bool),
        advantages=numbers,
        old_logps=numbers if has_old else None,
        ref_logps=numbers if kl else None,
        rollout_logps=numbers if correction else None,
        rollout_weights=numbers if correction and has_old else None,
        sequence=None,
        num_sequences=2,
    )
    head_rows = HeadRows(None, ids, 2, None, triton_rows)
    row_pass = triton_rows.policy_row_pass(head, head_rows, rows, numbers, config)
    row_pass(logits, slice(0, 2), out)


def test_the_row_kernels_are_compiled_as_they_are_launched(monkeypatch):
    cases = list(compile_report.row_cases())
    recorders = record(monkeypatch, triton_rows)
    flags = itertools.product(
        ("clip", "cispo", "sapo", "vespo", "reinforce", "dppo_tv", "dppo_kl"),
        (None, "k1", "k2", "k3"), (None, "truncate", "mask"),
        (None, 3.0), (0.0, 0.1), (False, True), (None, 5.0),
    )  # fmt: skip
    dtypes = [(torch.float64, torch.float64), (torch.float32, torch.float32)]
    dtypes += [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
    settings = itertools.cycle(itertools.product(VOCABULARIES, dtypes))
    # three of the 28 settings for each of the 1344 flags, other ones each time: all pairs meet
    for chosen in flags:
        for vocab, pair in itertools.islice(settings, 3):
            launch_rows(vocab, *pair, chosen)
    # A placeholder of another dtype stands for a tensor that is not used.
    unused = {"old_logps_ptr", "ref_logps_ptr", "rollout_ptr"}
    for launch in recorders["policy_rows_kernel"].launches:
        for name in unused:
            assert launch[name].dtype == launch["logits_ptr"].dtype
    assert_same_choices(recorders, cases)


@pytest.mark.parametrize("target", TARGETS)
def test_the_fused_log_probs_are_compiled_as_they_are_launched(target, monkeypatch):
    facts = TARGETS[target]
    cases = list(compile_report.linear_cases(facts))
    recorders = record(monkeypatch, triton_linear_stats)
    monkeypatch.setattr(triton_linear_stats, "INTERPRETED", False)
    monkeypatch.setattr(
        triton_linear_stats,
        "options_on",
        lambda device, has_bias: triton_linear_stats.launch_options(
            facts.gpu.backend, facts.gpu.arch, facts.shared_bytes, has_bias=has_bias
        ),
    )
    for dtype, bias, softcap, entropy, width in itertools.product(
        (torch.bfloat16, torch.float16), (False, True), (None, 5.0), (False, True), (48, 128)
    ):
        weight = torch.zeros(300, width, dtype=dtype)
        head = LinearHead(weight, weight[:, 0] if bias else None, dtype, logit_softcap=softcap)
        hidden, ids = torch.zeros(3, width), torch.zeros(3, dtype=torch.int64)
        triton_linear_stats.linear_statistics(hidden, head, ids, with_entropy=entropy)
    assert_same_choices(recorders, cases)


def test_every_kernel_of_the_package_is_in_the_report():
    """What is launched, name[grid](...), and what is decorated and named as a kernel."""
    names = set()
    for file in TRITON_FILES:
        for node in ast.walk(ast.parse((ROOT / f"fgrpo_kernels/{file}.py").read_text())):
            launched = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if launched and isinstance(node.func.value, ast.Name):
                names.add(node.func.value.id)
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names.add(node.name)
    for target in TARGETS.values():
        assert {case.kernel for case in compile_report.cases(target)} == names


def test_pairs_of_choices_all_occur():
    factors = {"a": (1, 2, 3), "b": (1, 2), "c": (None, "x"), "d": (False, True)}
    rows = list(compile_report.all_pairs(factors))
    for (a, values), (b, others) in itertools.combinations(factors.items(), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(values, others))
    assert len(rows) < 3 * 2 * 2 * 2 / 2


def test_what_fails():
    target = TARGETS["sm_90"]
    cases = list(compile_report.linear_cases(target))
    product = next(case for case in cases if case.multiplies)
    good = dict(spills=0, shared_bytes=227 * 1024, tensor_core={"HGMMA.64x256x16.F32": 4})
    assert compile_report.failures(target, product, **good) == []
    for change, words in (
        (dict(spills=3), "3 spills"),
        (dict(shared_bytes=227 * 1024 + 1), "232449 bytes of shared memory, limit 232448"),
        (dict(tensor_core={}), "no HGMMA instruction"),
        (dict(tensor_core={"HMMA.16816.F32": 4}), "no HGMMA instruction"),  # an older GPU's
    ):
        assert compile_report.failures(target, product, **good | change) == [words]
    row_kernel = replace(product, multiplies=False)
    assert compile_report.failures(target, row_kernel, **good | dict(tensor_core={})) == []


SASS = """
	.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E R8, desc[UR4][R2.64] ;
        /*0030*/              @P1  LDG.E.U16 R9, desc[UR4][R2.64+0x2] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64], P1 ;
        /*0050*/                   LDG.E.64.CONSTANT R10, desc[UR4][R2.64] ;
        /*0060*/                   STL [R1], R8 ;
        /*0070*/             @!UP2 STL.64 [R1+0x8], R8 ;
        /*0080*/                   LDL.LU R8, [R1] ;
        /*0090*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00a0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/                   HMMA.16816.F32 R4, R4, R6, R4 ;
        /*00c0*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11] ;
        /*00d0*/                   STG.E desc[UR4][R2.64], R8 ;
        /*00e0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00f0*/                   STS.128 [R3], R4 ;
        /*0100*/                   FFMA R8, R8, R9, R10 ;
"""  # noqa: E501
GCN = """
kernel:
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_ushort v6, v[4:5], off
	buffer_load_dword v7, v8, s[0:3], 0 offen
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	ds_write_b128 v0, v[0:3]
	global_store_dwordx2 v[4:5], v[0:1], off
	buffer_store_short v1, v8, s[0:3], 0 offen
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: {sgpr}
    .vgpr_count:     120
    .vgpr_spill_count: {vgpr}
"""


def test_reading_nvidia_code():
    assert machine_code.read_sass(SASS) == {
        "spills": 3,
        "tensor_core": {"HGMMA.64x256x16.F32.BF16": 2, "HMMA.16816.F32": 1, "UTCHMMA": 1},
        "loads": {128: 2, 64: 1, 32: 1, 16: 1},
        "stores": {128: 1, 32: 1},
    }


@pytest.mark.parametrize(
    "counts,spills", [((0, 0, 0), 0), ((8, 0, 0), 2), ((8, 1, 4), 5), ((0, 3, 0), 3)]
)
def test_reading_amd_code(counts, spills):
    scratch, sgpr, vgpr = counts
    code = GCN.format(scratch=scratch, sgpr=sgpr, vgpr=vgpr)
    assert machine_code.read_gcn(code) == {
        "registers": 120,
        "stack_bytes": scratch,
        "spills": spills,
        "tensor_core": {"v_mfma_f32_32x32x8_bf16_1k": 2},
        "loads": {128: 1, 32: 1, 16: 1},
        "stores": {64: 1, 16: 1},
    }


def test_the_summary_has_the_worst_of_each_kernel():
    one = compile_report.Compiled(
        "sm_90", "k", "bf16", 40, 0, 0, 100, {"HGMMA.64x256x16.F32.BF16": 4}, {128: 1}, {32: 1}, []
    )
    two = replace(one, registers=50, spills=2, shared_bytes=90, loads={64: 3}, stores={64: 1})
    assert list(compile_report.summary([one, two]))[2:] == [
        "| sm_90 | k | 50 | 2 | 100 | HGMMA | 128 / 64 |"
    ]
