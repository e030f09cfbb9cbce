"""The table for a terminal."""

from __future__ import annotations

from vllm_graft.audit.render import text


def test_the_table_shows_what_changed_and_folds_the_rest(report):
    assert text(report, 120).split("\n") == [
        "TARGET                       WAY       0.31.0  0.32.0  WHERE",
        "beta:",
        "v1.worker:Worker.stop        override  sig!    gone    beta/patches.py:7",
        "v1.queue:make_queue          replace           moved   beta/q.py:3",
        "alpha 1.2:",
        "v1.sched:Scheduler.__init__  wrap      body    sig+    alpha/patches.py:7",
        "v1.sched:Scheduler.schedule  wrap      ·       body    alpha/patches.py:7",
        "and 1 unchanged, 1 not judged",
        "4 of 6 uses of vLLM need a look, in 2 packages checked against vLLM 0.31.0 to 0.32.0, "
        "each compared with the release before.",
    ]


def test_every_row_on_request(report):
    shown = text(report, 120, every=True)
    assert "config.vllm:VllmConfig.check" in shown
    assert "v1.late:Later" in shown
    assert "1 unchanged" not in shown


def test_names_lose_their_beginning_where_the_width_is_short(make, report):
    long = make("alpha", f"vllm.{'deep.' * 20}module:Class.method", "same", "gone")
    lines = text(type(report)((), "", report.releases, (long,), ()), 70).split("\n")[:-1]
    assert max(map(len, lines)) <= 70
    assert "module:Class.method" in lines[1]
    assert lines[1].startswith("…")


def test_a_hostile_name_stays_in_its_line(hostile):
    shown = text(hostile, 200)
    assert "\x1b" not in shown
    assert len(shown.split("\n")) == 3


def test_an_empty_report_is_one_line(empty):
    assert text(empty, 80) == "No use of vLLM was found in 1 package."


def test_a_report_of_unchanged_rows_has_no_table(make, report):
    quiet = type(report)((), "", report.releases, (make("alpha", "vllm.a:b", "same", "same"),), ())
    assert text(quiet, 80).startswith("1 unchanged\nNone of 1 use of vLLM needs a look")
