"""What `python -m benchmarks.planner` prints for people."""

from benchmarks.planner import print_table

OURS = {
    "plan_seconds": 0.5,
    "plan_cpu_seconds": 0.4,
    "peak_rss_bytes": 9e7,
    "idle_ranks": 0,
    "step_seconds": 0.006,
    "step_over_bound": 1.02,
}


def test_both_ratios_are_printed_and_a_plan_that_torchrec_cannot_judge_has_none(capsys):
    def compared(judged):
        ratios = {"step_torchrec_over_ours_by_our_model": 1.36, "step_torchrec_over_ours_by_its_estimator": judged}
        return {"ours": OURS, "torchrec": {"plan_seconds": 9.0}, **ratios}

    late = {"ours": OURS, "torchrec": {"error": "no plan in 60 s"}}
    print_table({"problems": {"judged": compared(0.24), "not judged": compared(None), "late": late}})
    head, judged, not_judged, error = capsys.readouterr().out.splitlines()
    assert head.endswith("its step/ours  by its estimator")
    assert judged.split()[-2:] == ["1.36", "0.24"] and not_judged.split()[-2:] == ["1.36", "-"]
    assert error.endswith("no plan in 60 s") and len(judged) == len(not_judged) == len(head)
