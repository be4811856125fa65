"""The sanitizer's report; no GPU is needed."""

import pytest

from tests.gpu import sanitizer

RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at decode+0x100 in decode.py:569
=========     and Write access at decode+0x17d0 in decode.py:569 [211 hazards]
=========     and Write access at decode+0x8c40 in decode.py:590 [264 hazards]
========= 
decode D64 1
========= Error: Race reported between Read access at decode+0x100 in decode.py:569
=========     and Write access at decode+0x17d0 in decode.py:123 [211 hazards]
========= 
========= Error: Race reported between Read access at _prefill+0x100 in prefill.py:569
=========     and Write access at _prefill+0x17d0 in prefill.py:570 [1 hazard]
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", {"errors": 0}),
        ("x\n========= ERROR SUMMARY: 1 error\n", {"errors": 1}),
        (
            "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n",
            {"errors": 2, "warnings": 1, "dispatch": 0},
        ),
        (RACES, {"errors": 3, "warnings": 0, "dispatch": 1}),
        ("========= Target application returned an error\n", {}),
    ],
)
def test_sanitizer_summaries(output, expected):
    assert sanitizer.parse(output, {"decode": ("decode.py", range(568, 600))}) == expected


def test_dispatchers_are_the_kernels_that_specialise_their_warps():
    found = sanitizer.dispatchers()
    assert {name: file for name, (file, _) in found.items()} == {
        "prefill_kernel": "kernel.py", "decode_kernel": "kernel.py", "latent_kernel": "kernel.py",
        "_race": "sanitized.py", "_ordered": "sanitized.py",
    }  # fmt: skip
    source = sanitizer.SANITIZED.read_text().splitlines()
    assert [source[found[name][1][0]] for name in ("_race", "_ordered")] == [
        "def _race(out_ptr):",
        "def _ordered(out_ptr):",
    ]  # 1-based


def test_a_sanitizer_must_find_what_is_planted_and_nothing_else():
    clean = {"case": "memcheck-append", "finished": True, "errors": 0}
    assert sanitizer.as_it_should(clean) and not sanitizer.as_it_should(clean | {"errors": 2})
    assert sanitizer.as_it_should(clean | {"errors": 2, "dispatch": 2}) and not sanitizer.as_it_should(
        clean | {"warnings": 1}
    )
    assert not sanitizer.as_it_should(clean | {"finished": False})
    planted = {"case": "memcheck-planted", "finished": False}
    assert sanitizer.as_it_should(planted | {"errors": 2}) and not sanitizer.as_it_should(planted | {"errors": 0})
    assert not sanitizer.as_it_should(planted)
    races = [
        row | {"case": f"racecheck-{name}", "errors": 3} for row in [clean] for name in ("ordered", "prefill", "append")
    ]
    assert [row["case"] for row in sanitizer.faults(races)] == [
        "racecheck-append"
    ]  # no mbarriers there: a race is a race
    races[0]["errors"] = 0  # the tool follows mbarriers
    assert [row["case"] for row in sanitizer.faults(races)] == ["racecheck-prefill", "racecheck-append"]
    assert sanitizer.faults([clean | {"case": "memcheck-prefill", "errors": 1}])
