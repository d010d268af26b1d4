"""When a child that died is started again, and when it is given up."""

from __future__ import annotations

from graft.cli.restart import GiveUp, Restart, RestartPolicy, exit_words


def test_a_child_that_served_is_started_again_at_once() -> None:
    policy = RestartPolicy()
    policy.ready()
    assert policy.died(100.0, -9, was_ready=True) == Restart(0.0)


def test_pauses_grow_up_to_a_limit_while_it_keeps_dying() -> None:
    policy = RestartPolicy()
    delays = []
    for death in range(9):
        policy.ready()
        verdict = policy.died(float(death), -9, was_ready=True)
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy()
    policy.ready()
    policy.died(0.0, -9, was_ready=True)
    policy.ready()
    assert policy.died(61.0, -9, was_ready=True) == Restart(0.0)


def test_dying_again_and_again_before_it_is_ready_ends_it() -> None:
    policy = RestartPolicy(max_failures=3)
    assert isinstance(policy.died(0.0, 1, was_ready=False), Restart)
    assert isinstance(policy.died(1.0, 1, was_ready=False), Restart)
    assert isinstance(policy.died(2.0, 1, was_ready=False), GiveUp)


def test_being_ready_starts_the_count_anew() -> None:
    policy = RestartPolicy(max_failures=2)
    policy.died(0.0, 1, was_ready=False)
    policy.ready()
    policy.died(1.0, -9, was_ready=True)
    assert isinstance(policy.died(2.0, 1, was_ready=False), Restart)


def test_refused_settings_are_not_tried_again() -> None:
    assert isinstance(RestartPolicy().died(0.0, 2, was_ready=False), GiveUp)


def test_a_port_still_held_after_a_death_is_tried_again() -> None:
    policy = RestartPolicy()
    policy.ready()
    policy.died(0.0, -9, was_ready=True)
    assert isinstance(policy.died(1.0, 2, was_ready=False), Restart)


def test_exit_codes_read_as_words() -> None:
    assert exit_words(3) == "exit code 3"
    assert exit_words(-9) == "signal SIGKILL"
    assert exit_words(-250) == "signal 250"


def test_what_is_not_needed_is_tried_for_ever_with_longer_pauses() -> None:
    policy = RestartPolicy(max_failures=3)
    policy.ready()
    verdicts = [
        policy.died(100.0 * number, 1, was_ready=False, needed=False) for number in range(12)
    ]
    delays = [verdict.delay_s for verdict in verdicts if isinstance(verdict, Restart)]
    assert len(delays) == 12
    assert delays[2:7] == [8.0, 16.0, 32.0, 60.0, 60.0]
    assert policy.hopeless
    policy.ready()
    assert not policy.hopeless
