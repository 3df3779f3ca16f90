"""The page of predictions: its arithmetic by hand, and that the page in docs is what the command prints."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks import assembly, model, report
from benchmarks.dry_run import Operation, size_of

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "predictions.md"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_an_operation_takes_its_longest_term():
    h200 = model.MACHINES["h200"]
    copy = model.cost(Operation("copy", 4_320_000_000), 1, h200)  # 0.9 x 4.8 TB/s
    assert copy.memory == pytest.approx(1e-3) and copy.longest() == "memory"
    assert copy.seconds() == pytest.approx(1e-3 + model.START)
    product = model.cost(Operation("mm", 4_320_000_000, 7.912e11, torch.bfloat16), 1, h200)  # 0.8 x 989 TFLOP/s
    assert product.products == pytest.approx(1e-3) and product.seconds() == pytest.approx(1e-3 + model.START)
    # One program draws 64 bytes a clock, however fast the memory is.
    alone = model.cost(Operation("copy", 64 * 1980, programs=1), 1, h200)
    assert alone.memory == pytest.approx(1e-6)


def test_bytes_are_those_that_lie_in_memory():
    x = torch.empty(3, 1).expand(3, 1000)
    assert size_of(x, x, torch.empty(5, dtype=torch.int64), 7) == 3 * 4 + 5 * 8
    assert size_of(torch.empty(0, 4)) == 0


LOOP = """
\t\tFunction : first
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x00000a0000017a02 */
                                                                     /* 0x000fe40000000f00 */
        /*0010*/                   LDG.E.128 R4, [R2.64] ;           /* 0x0000000402047981 */
        /*0020*/              @!P0 CALL.REL.NOINC 0x0080 ;
        /*0030*/                   BRA.DIV UR4, 0x0060 ;
        /*0040*/               @P0 BRA 0x10 ;
        /*0050*/                   EXIT ;
        /*0060*/                   WARPSYNC.COLLECTIVE R6, 0x0070 ;
        /*0070*/                   BRA 0x40;
        /*0080*/                   RET.REL.NODEC R2 0x0 ;
        /*0090*/                   BRA 0x90;
\t\tFunction : second
        /*0000*/                   EXIT ;
"""


def test_instructions_of_loops_count_as_often_as_they_run():
    found = assembly.functions(LOOP)
    assert [one.name for one in found["first"]] == ["MOV", "LDG", "CALL", "BRA", "BRA", "EXIT"]
    assert [one.loads for one in found["first"]] == [0, 16, 0, 0, 0, 0]
    assert assembly.executed(found["first"], 10) == 2 + 4 * 10 and assembly.executed(found["second"], 10) == 1


def guided(rows: list[report.Row]) -> str:
    return "\n".join(model.of_op("guided", model.MACHINES["h200"], rows))


@needs_triton
def test_a_result_file_fills_the_empty_column(elsewhere):
    row = {"op": "guided", "size": 64, "contender": "guided_log_probs triton", "gpu": "NVIDIA H200"}
    rows = [row | {"device_s": 2e-5}, row | {"device_s": 1.5e-5}, row | {"contender": "eager", "device_s": 1.0}]
    before, after = (elsewhere(guided, given).splitlines() for given in ([], rows))
    (changed,) = (pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    assert changed[0].startswith("| 64 |") and changed[0].endswith(" |  |") and changed[1].endswith(" | 15.0 |")


def printed(*command: str) -> str:
    sys.argv = ["benchmarks", *command]
    with redirect_stdout(io.StringIO()) as text:
        suite.main()
    return text.getvalue()


@needs_triton
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_page_is_what_the_command_prints(elsewhere):
    if model.compilers() not in PAGE.read_text():
        pytest.skip(f"the page is not of {model.compilers()}")
    assert PAGE.read_text() == elsewhere(printed, "model", "--gpu", "h200")
