"""`Loader.epochs`: the batches of the flat stream, by epoch."""

from __future__ import annotations

from typing import Any

import pytest

from resolute import Loader, Plan, ResoluteError, ShardSet, Stage

STAGES = [Stage(res=32, epochs=2, batch_size=25), Stage(res=48, epochs=1, batch_size=30)]


def numbers(batches: Any) -> list[int]:
    return [batch.spec.index for batch in batches]


@pytest.fixture
def plan(shard_set: ShardSet) -> Plan:
    return Plan(shard_set, STAGES, eval_batch_size=10)


def test_epochs_have_the_batches_of_the_flat_stream(plan: Plan) -> None:
    seen: list[int] = []
    about = []
    with Loader(plan) as loader:
        for epoch in loader.epochs():
            train, val = list(epoch.train), list(epoch.val)
            assert (len(train), len(val)) == (len(epoch.train), len(epoch.val))
            assert {batch.spec.split for batch in train} == {"train"}
            assert {batch.spec.split for batch in val} == {"val"}
            assert {batch.spec.epoch for batch in train + val} == {epoch.number}
            assert epoch.train.is_over
            assert epoch.val.is_over
            about.append((epoch.number, epoch.stage, epoch.res))
            seen += numbers(train + val)
        assert loader.position == plan.total_batches
    assert seen == list(range(plan.total_batches))
    assert about == [(0, 0, 32), (1, 0, 32), (2, 1, 48)]


def test_batches_that_a_loop_leaves_out_are_skipped(plan: Plan) -> None:
    phases = plan.phases
    with Loader(plan) as loader:
        epochs = loader.epochs()
        first = next(epochs)
        assert next(iter(first.train)).spec.index == 0
        assert numbers(first.val) == [phases[1].first, phases[1].first + 1]
        second = next(epochs)
        assert next(iter(second.train)).spec.index == phases[2].first
        third = next(epochs)  # without the validation of the second
        assert next(iter(third.train)).spec.index == phases[4].first
        with pytest.raises(ResoluteError, match="3 batches of an epoch that have all been returned or left out"):
            list(second.train)


def test_after_a_resume_within_an_epoch_the_first_one_has_what_is_left(plan: Plan) -> None:
    validation = plan.phases[1]
    with Loader(plan) as loader:
        loader.load_state_dict({"next_batch": 1})
        assert [len(list(epoch.train)) for epoch in loader.epochs()] == [2, 3, 3]
        loader.load_state_dict({"next_batch": validation.first + 1})
        epoch = next(loader.epochs())
        assert (epoch.number, epoch.train.is_over, numbers(epoch.val)) == (0, True, [validation.first + 1])
        assert (len(epoch.train), len(epoch.val)) == (3, 2)


def test_a_validation_before_the_training_of_its_epoch_is_refused(plan: Plan) -> None:
    with Loader(plan) as loader:
        for epoch in loader.epochs():
            with pytest.raises(ResoluteError, match=rf"epoch.val before epoch.train in epoch {epoch.number}, which"):
                list(epoch.val)
            assert len(list(epoch.train)) == len(epoch.train)
            assert len(list(epoch.val)) == len(epoch.val)


def test_a_second_loop_over_batches_that_were_returned_is_refused(plan: Plan) -> None:
    with Loader(plan) as loader:
        for epoch in loader.epochs():
            for part in (epoch.train, epoch.val):
                assert len(list(part)) == len(part)
                with pytest.raises(ResoluteError, match=rf"a loop over {len(part)} batches of an epoch that have all"):
                    list(part)
        for again in (loader.epochs, lambda: iter(loader)):
            with pytest.raises(ResoluteError, match=f"a second loop, but all {plan.total_batches} batches have been"):
                again()
        loader.load_state_dict({"next_batch": 0})
        assert len(list(loader)) == plan.total_batches
        loader.load_state_dict({"next_batch": plan.total_batches})  # of a finished run: nothing is left, nothing wrong
        assert list(loader) == list(loader.epochs()) == []


def test_a_second_loop_over_epochs_whose_last_validation_was_left_out_is_refused(plan: Plan) -> None:
    with Loader(plan) as loader:
        for epoch in loader.epochs():
            assert len(list(epoch.train)) == len(epoch.train)
        with pytest.raises(ResoluteError, match=r"returned or left out; .* load_state_dict\(\{\"next_batch\": 10\}\)"):
            [list(epoch.train) for epoch in loader.epochs()]


def test_loops_over_two_epochs_at_once_are_refused(plan: Plan) -> None:
    with Loader(plan) as loader:
        first, second, *_ = loader.epochs()
        with pytest.raises(
            ResoluteError, match="another one has moved the loader to batch 6, past these; loop over one"
        ):
            list(zip(first.train, second.train, strict=True))
        assert numbers(second.train) == [6, 7]  # what is left of it


def test_after_a_state_past_an_epoch_has_been_loaded_nothing_is_left_of_it(plan: Plan) -> None:
    with Loader(plan) as loader:
        first, *_ = loader.epochs()
        assert next(iter(first.train)).spec.index == 0
        loader.load_state_dict({"next_batch": len(first.train)})  # as after damaged samples at its end
        assert numbers(first.train) == []
        assert numbers(first.val) == [3, 4]


def test_a_validation_at_the_last_training_batch_of_its_epoch_is_allowed(plan: Plan) -> None:
    """Trainers that take batches from a generator validate before it ends."""
    seen: list[int] = []
    with Loader(plan) as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                seen.append(batch.spec.index)
                if epoch.train.is_over:
                    seen += numbers(epoch.val)
    assert seen == list(range(plan.total_batches))
