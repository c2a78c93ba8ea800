"""Requests that wait together are answered together, and none pays for another."""

import asyncio
import threading

import numpy as np
import pytest

from serving.batching import MicroBatcher, QueueFull


class Scorer:
    """Scores a request of numbers by doubling them; remembers the batches; can be held back."""

    def __init__(self):
        self.batches = []
        self.threads = set()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, parts):
        self.batches.append([len(part) for part in parts])
        self.threads.add(threading.current_thread())
        assert self.go.wait(10)
        if any(value < 0 for part in parts for value in part):
            raise ArithmeticError("a negative number")
        return [KeyError("refused") if 777 in part else np.array([2 * value for value in part]) for part in parts]


def _run(scenario, *, scorer=None, max_batch_rows=8, max_wait_seconds=0.05, max_queue_rows=100, **more):
    scorer = scorer or Scorer()

    async def main():
        batcher = MicroBatcher(scorer, max_batch_rows, max_wait_seconds, max_queue_rows, **more)
        batcher.start()
        try:
            return await asyncio.wait_for(scenario(batcher, scorer), 20)
        finally:
            scorer.go.set()
            await batcher.close()

    return asyncio.run(main()), scorer


async def _until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def test_requests_of_one_window_are_scored_together_and_each_gets_its_own_scores():
    async def scenario(batcher, scorer):
        return await asyncio.gather(batcher.submit([1, 2]), batcher.submit([3]), batcher.submit([4, 5]))

    answers, scorer = _run(scenario)
    assert [answer.tolist() for answer in answers] == [[2, 4], [6], [8, 10]]
    assert scorer.batches == [[2, 1, 2]]
    assert threading.main_thread() not in scorer.threads and len(scorer.threads) == 1


def test_a_full_batch_does_not_wait_for_the_clock():
    async def scenario(batcher, scorer):
        return await asyncio.wait_for(asyncio.gather(batcher.submit([1] * 5), batcher.submit([1] * 3)), 5)

    _, scorer = _run(scenario, max_wait_seconds=60)
    assert scorer.batches == [[5, 3]]


def test_no_batch_has_more_rows_than_allowed_but_for_a_single_large_request():
    async def scenario(batcher, scorer):
        return await asyncio.gather(*(batcher.submit([1] * rows) for rows in (5, 5, 20, 3, 5)))

    answers, scorer = _run(scenario)
    assert [len(answer) for answer in answers] == [5, 5, 20, 3, 5]
    assert scorer.batches == [[5], [5], [20], [3, 5]]


def test_while_a_batch_is_scored_the_next_one_fills():
    async def scenario(batcher, scorer):
        scorer.go.clear()
        first = asyncio.ensure_future(batcher.submit([1]))
        await _until(lambda: scorer.batches)
        others = [asyncio.ensure_future(batcher.submit([1])) for _ in range(6)]
        await _until(lambda: batcher.waiting_rows == 6)
        scorer.go.set()
        return await asyncio.gather(first, *others)

    _, scorer = _run(scenario, max_wait_seconds=0.0)
    assert scorer.batches == [[1], [1] * 6]


def test_a_request_whose_rows_break_the_scorer_fails_alone():
    async def scenario(batcher, scorer):
        requests = [batcher.submit([1]), batcher.submit([-1]), batcher.submit([3])]
        return await asyncio.gather(*requests, return_exceptions=True)

    answers, _ = _run(scenario)
    assert answers[0].tolist() == [2] and answers[2].tolist() == [6]
    assert isinstance(answers[1], ArithmeticError)


def test_an_answer_that_is_an_exception_is_raised_for_its_request_alone():
    async def scenario(batcher, scorer):
        requests = [batcher.submit([1]), batcher.submit([777, 1]), batcher.submit([3])]
        return await asyncio.gather(*requests, return_exceptions=True)

    answers, scorer = _run(scenario)
    assert answers[0].tolist() == [2] and answers[2].tolist() == [6]
    assert isinstance(answers[1], KeyError)
    assert scorer.batches == [[1, 2, 1]]


def test_a_request_that_was_given_up_is_not_scored():
    async def scenario(batcher, scorer):
        scorer.go.clear()
        first = asyncio.ensure_future(batcher.submit([1]))
        await _until(lambda: scorer.batches)
        gone = asyncio.ensure_future(batcher.submit([1] * 4))
        stays = asyncio.ensure_future(batcher.submit([1] * 2))
        await _until(lambda: batcher.waiting_rows == 6)
        gone.cancel()
        await _until(lambda: batcher.waiting_rows == 2)
        scorer.go.set()
        return await asyncio.gather(first, stays)

    _, scorer = _run(scenario)
    assert scorer.batches == [[1], [2]]


def test_a_request_that_was_given_up_while_it_is_scored_hurts_nobody():
    async def scenario(batcher, scorer):
        scorer.go.clear()
        gone, stays = asyncio.ensure_future(batcher.submit([1])), asyncio.ensure_future(batcher.submit([2]))
        await _until(lambda: scorer.batches)
        gone.cancel()
        scorer.go.set()
        return (await stays).tolist(), (await batcher.submit([3])).tolist(), batcher.waiting_rows

    answers, _ = _run(scenario)
    assert answers == ([4], [6], 0)


def test_too_many_waiting_rows_are_refused_at_once():
    async def scenario(batcher, scorer):
        scorer.go.clear()
        first = asyncio.ensure_future(batcher.submit([1]))
        await _until(lambda: scorer.batches)
        waiting = asyncio.ensure_future(batcher.submit([1] * 7))
        await _until(lambda: batcher.waiting_rows == 7)
        with pytest.raises(QueueFull):
            await batcher.submit([1] * 4)
        scorer.go.set()
        return await asyncio.gather(first, waiting)

    answers, _ = _run(scenario, max_queue_rows=10)
    assert [len(answer) for answer in answers] == [1, 7]


def test_closing_answers_what_waits_and_refuses_what_comes_after():
    async def scenario(batcher, scorer):
        scorer.go.clear()
        requests = [asyncio.ensure_future(batcher.submit([number])) for number in range(3)]
        await _until(lambda: scorer.batches)
        requests += [asyncio.ensure_future(batcher.submit([number])) for number in range(3, 20)]
        await _until(lambda: batcher.waiting_rows == 17)
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await batcher.submit([1])
        scorer.go.set()
        await closing
        return [request.result().tolist() for request in requests]

    answers, _ = _run(scenario, max_wait_seconds=60, max_batch_rows=3)
    assert answers == [[2 * number] for number in range(20)]


def test_each_batch_is_reported_with_its_rows():
    seen = []

    async def scenario(batcher, scorer):
        await asyncio.gather(batcher.submit([1, 1]), batcher.submit([1]))

    _run(scenario, on_batch=lambda rows, seconds: seen.append((rows, seconds >= 0)))
    assert seen == [(3, True)]
