"""A router's event list through the decision core: what is read, what is refused, what comes out."""

import json

import pytest

from services.common.errors import ConfigError
from services.ops.__main__ import main
from services.scheduler.core.cmlfq import QueueSettings
from services.simulator import routing


def schedule(name, **more):
    return {"event": "schedule", "trajectory": name, "tokens": 10, **more}


def turn(name, **more):
    return {"event": "tool_return", "trajectory": name, "generated": 100, "tool": "search", **more}


def finish(name, **more):
    return {"event": "finish", "trajectory": name, "generated": 5, **more}


def lines(*events):
    return [json.dumps(e) + "\n" for e in events]


def routed(*events, engines=1, slots=1):
    return routing.route(routing.read(lines(*events), "f"), engines, slots, QueueSettings())


def test_one_place_is_passed_on_in_order_and_what_never_got_one_says_so():
    result = routed(schedule("a"), schedule("b"), schedule("c"), turn("a"), finish("a"))
    assert result.places == {"a": ["engine-0"], "b": ["engine-0"], "c": []}
    assert result.counts == {"schedule": 3, "tool_return": 1, "finish": 1}
    assert len(result.seconds) == 5


def test_one_past_its_quantum_makes_way_for_one_that_waited_too_long_and_comes_back():
    events = [schedule("a", at_s=0.0), schedule("b", at_s=1.0), turn("a", at_s=30.0), turn("a", at_s=31.0)]
    result = routed(*events, finish("b", at_s=60.0))
    assert result.decided["STARVING"] == 1
    assert result.places == {"a": ["engine-0", "engine-0"], "b": ["engine-0"]}


def test_engines_are_those_that_the_router_named_and_its_choices_are_compared():
    result = routed(schedule("a", engine="x"), schedule("b", engine="x"), engines=9)
    assert result.places == {"a": ["x"], "b": []}
    assert (result.agreed, result.compared) == (1, 1)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "found list"),
        (json.dumps(schedule("a", colour=1)), "unknown key 'colour'"),
        (json.dumps(schedule("a", tokens=-1)), "expected 0 or more"),
        (json.dumps(schedule("a", tokens=True)), "expected int"),
        (json.dumps(schedule("a", at_s=float("nan"))), "at_s"),
        (json.dumps({"event": "nap", "trajectory": "a"}), "expected one of schedule, tool_return, finish"),
        (json.dumps({"event": "finish"}), "trajectory is missing"),
        (json.dumps(schedule("old")), "scheduled a second time"),
        (json.dumps(turn("nobody")), "never scheduled"),
        (json.dumps(turn("gone")), "has finished already"),
        (json.dumps(turn("old", outcome="FINE")), "outcome is 'FINE'"),
        (json.dumps(turn("old", at_s=1.0)), "in order of time"),
    ],
)
def test_a_bad_line_is_named_by_its_number(event, says):
    before = lines(schedule("old", at_s=2.0), schedule("gone"), finish("gone"))
    with pytest.raises(ConfigError, match=r"f:5: ") as error:
        routing.read([*before, "\n", event], "f")
    assert says in str(error.value)


def test_the_command_prints_figures_and_places(tmp_path, capsys):
    file = tmp_path / "events.jsonl"
    file.write_text("".join(lines(schedule("a"), turn("a"), finish("a"))))
    assert main(["bench", "decisions", "--events", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["events"] == 3
    assert shown["counts"] == {"schedule": 1, "tool_return": 1, "finish": 1}
    assert len(shown["trajectories"]["a"]) == 1
    assert 0 < shown["p50_us"] <= shown["p99_us"]
    assert main(["bench", "decisions", "--events", str(file)]) == 0
    assert "events/s" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_read(tmp_path, capsys):
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(turn("a")))
    assert main(["bench", "decisions", "--events", str(file)]) == 2
    assert f"{file}:1: tool_return of 'a', which was never scheduled" in capsys.readouterr().err
    assert main(["bench", "decisions", "--events", str(tmp_path / "none")]) == 2
    file.write_text("\n")
    assert main(["bench", "decisions", "--events", str(file)]) == 2
