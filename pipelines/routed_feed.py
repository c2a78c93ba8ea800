"""This rank's share of each batch, routed one batch ahead of the step that takes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pipelines.feed import Ready
from pipelines.reading import SourceBatch
from tpurec.sharding.batch_router import BatchRouter
from tpurec.sharding.routed import RoutedFeatures


class RoutedFeed:
    """Routes this rank's share of each batch ahead of the step: reads and routes it in a thread, then sends its ids.

    While the step of batch t computes, the ids of batch t + 1 travel, and batch t + 2 is read and routed. Every rank is
    equally far ahead, whenever it is asked, so that their collectives match.

    Args:
        router: of the model; its host group belongs to this feed alone.
    """

    def __init__(self, router: BatchRouter) -> None:
        self._router = router

    def __call__(self, batches: Iterable[SourceBatch]) -> Iterator[Ready]:
        """Make batches ready.

        Args:
            batches: this rank's shares; every rank has as many.

        Yields:
            The same batches, in order.
        """
        source = iter(batches)

        def prepare() -> Ready | None:
            item = next(source, None)
            if item is None:
                return None
            routed = self._router.prepare(item.packed)
            return Ready(item, routed.num_labelled_global, lambda: routed)

        pool = ThreadPoolExecutor(1, thread_name_prefix="router")
        following = pool.submit(prepare)
        upcoming: Ready | None = None
        try:
            current = following.result()
            following = pool.submit(prepare)
            while current is not None:
                upcoming = following.result()
                if upcoming is not None:
                    upcoming.batch().start_id_exchange()
                    following = pool.submit(prepare)
                yield current
                current = upcoming
        except GeneratorExit:  # nobody wants the rest, and the peers stop here, too: end what is under way
            following.result()
            if upcoming is not None and isinstance(features := upcoming.batch().features, RoutedFeatures):
                features.received()
            raise
        finally:
            # After a failure the thread may hang in a collective that no peer will answer: it is not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
