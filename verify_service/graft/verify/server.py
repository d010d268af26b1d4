"""One verify replica: its gRPC server, its loading, its engine and its health."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from graft.common import log, metrics
from graft.common.errors import Draining
from graft.common.model_cache import Progress
from graft.common.server import GrpcServer
from graft.common.tracing import OFF, Tracing, open_tracing
from graft.common.tree import TreeLimits
from graft.kernels.cpu.simulate import Simulation
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.verify.budget import VerifyBudget
from graft.verify.capture import Capturer
from graft.verify.door import Door, default_rule
from graft.verify.engine import Engine
from graft.verify.grammar.grammars import Grammars, can_compile
from graft.verify.grammar.trials import Vocabulary
from graft.verify.incoming import Identity
from graft.verify.lanes import Lanes
from graft.verify.loading import Loaded, load
from graft.verify.metrics import VerifyMetrics
from graft.verify.offer import FeatureOffer
from graft.verify.runner import Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.self_check import check_target
from graft.verify.service import VerifyService
from graft.verify.serving import Serving
from graft.verify.settings import VerifySettings
from graft.verify.shelf import Room
from graft.verify.simulated import closed_to_clients, simulation_message, simulation_of

_log = log.get("server")

Loader = Callable[[VerifySettings, Progress], Loaded]

SERVICE_NAME = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name
_CLOSE_S = 1.0
_ENGINE_STOP_S = 10.0
_WATCH_SHARE = 0.25
_KEPT_PART = 4  # of the memory for hidden states, one part of so many is for cached pages
_WATCH_MAX_S = 1.0


class VerifyServer:
    """Binds at once, loads in the background, serves when ready, drains when stopped."""

    def __init__(self, settings: VerifySettings, loader: Loader = load) -> None:
        """Checks what the settings say together; `loader` brings the target up.

        Raises:
            InvalidArgument: two of them contradict each other.
        """
        settings.check_limits()
        self.settings = settings
        self._loader = loader
        self.metrics = VerifyMetrics()
        self.engine: Engine | None = None
        self.grammars: Grammars | None = None
        self._grpc: GrpcServer | None = None
        self._lanes = Lanes()
        self._service: VerifyService | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[None] | None = None
        self._close_metrics: Callable[[], None] = _nothing
        self._tracing: Tracing = OFF

    async def start(self) -> int:
        """Binds the port and begins to load; returns the port. NOT_SERVING until ready.

        Raises:
            InvalidArgument: the port is in use, or plain text was asked for beyond loopback.
        """
        settings, loop = self.settings, asyncio.get_running_loop()
        self._tracing = open_tracing("verify", settings.otlp_endpoint, rounds=settings.trace_rounds)
        self._service = VerifyService(self.metrics, self._tracing)
        self._grpc = GrpcServer(
            [SERVICE_NAME],
            tls=settings.tls,
            plaintext_ok=settings.insecure,
            tracing=self._tracing,
        )
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._service, self._grpc.server)
        await self._grpc.set_serving(False)
        port = await self._grpc.start(settings.host, settings.port)
        if settings.lane and settings.tls is None:
            await self._lanes.open(port)
        self._ready = loop.create_future()
        self._ready.add_done_callback(_seen)
        loaded: asyncio.Future[Loaded] = loop.create_future()
        threading.Thread(
            target=self._load, args=(loop, loaded), name="graft-load", daemon=True
        ).start()
        self._tasks.append(loop.create_task(self._serve(loaded)))
        _log.info("listening", host=settings.host, port=port)
        return port

    async def ready(self) -> None:
        """Returns once sessions are served.

        Raises:
            GraftError: the model cannot be served; the sentence says why.
        """
        assert self._ready is not None, "the server was not started"
        await asyncio.shield(self._ready)

    async def warm(self) -> None:
        """Gets ready for what sessions may ask for and would wait seconds for the first time."""
        if self.grammars is not None:
            await self.grammars.warm()

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING first; sessions have `grace_s` to end, then they are told to move."""
        if self._grpc is None or self._service is None:
            return
        self._lanes.close()  # first: who told us to stop may not wait for the rest
        await self._grpc.set_serving(False)
        if self.engine is not None:
            self.engine.submit(lambda scheduler, _: scheduler.drain())
            await self._service.wait_idle(grace_s)
            self._service.fail_sessions(Draining("this replica is shutting down"))
            self._service.streams.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._grpc.stop(_CLOSE_S)
        if self.engine is not None:
            stopped = await asyncio.to_thread(self.engine.stop, _ENGINE_STOP_S)
            if not stopped:
                _log.warning("engine abandoned", reason="its step did not end")
        if self.grammars is not None:
            await self.grammars.close()
        await asyncio.to_thread(self._close_metrics)
        await asyncio.to_thread(self._tracing.close)
        _log.info("stopped")

    def _load(self, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[Loaded]) -> None:
        """Loads on this thread and hands the result to the loop."""

        def tell(stage: str, share: float) -> None:
            assert self._service is not None
            self._service.loading = f"the model is loading: {stage}, {share:.0%}"

        def settle(result: Loaded | None, error: Exception | None) -> None:
            if loaded.cancelled():
                return
            if error is not None:
                loaded.set_exception(error)
            elif result is not None:
                loaded.set_result(result)

        result, failure = None, None
        try:
            result = self._loader(self.settings, tell)
            tell("checking", 1.0)
            check_target(result)
        except Exception as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    async def _serve(self, loaded: asyncio.Future[Loaded]) -> None:
        """Waits for the model, opens the service, then watches the engine."""
        assert self._ready is not None and self._grpc is not None and self._service is not None
        try:
            self._open(await loaded)
        except Exception as error:
            self._service.loading = f"the model could not be loaded: {error}"
            self._ready.set_exception(error)
            return
        await self._grpc.set_serving(True)
        self._ready.set_result(None)
        await self._watch(self._grpc, self._service)

    def _open(self, loaded: Loaded) -> None:
        assert self._service is not None
        settings, target, service = self.settings, loaded.target, self._service
        pool = loaded.new_pool()
        simulation = simulation_of(settings, target.vocab_size)
        self.grammars = _grammars(settings, loaded)
        limits = SchedulerLimits(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_step_rows=settings.max_step_rows,
            chunk_tokens=settings.chunk_tokens,
        )
        capturer = Capturer(target.decoder, loaded.ops, loaded.projections)
        kept_bytes = loaded.plan.feature_bytes // _KEPT_PART
        offer = FeatureOffer(
            hidden_size=target.config.hidden_size,
            num_layers=target.config.num_layers,
            share_bytes=(loaded.plan.feature_bytes - kept_bytes) // settings.max_running,
            kept_bytes=kept_bytes,
            projections=capturer.shapes,
        )
        budget = VerifyBudget() if settings.trim_trees and simulation is None else None
        scheduler = Scheduler(limits, pool, offer, budget)
        runner = Runner(target.decoder, loaded.ops, loaded.kv, capturer, simulation)
        engine = Engine(scheduler, runner, service.deliver)
        service.serve(
            Serving(
                engine=engine,
                door=Door(
                    target.vocab_size,
                    target.context_length,
                    frozenset(target.eos_token_ids),
                    default=default_rule(settings),
                    closed=closed_to_clients(settings),
                    grammars=self.grammars is not None,
                ),
                limits=TreeLimits(settings.max_nodes, settings.max_depth, target.vocab_size),
                identity=Identity(target.vocab_size, target.tokenizer_digest),
                description=self._description(loaded, offer, simulation),
                max_trees=settings.max_trees,
                tally=scheduler.tally,
                room=Room(settings.max_held_trees),
                lanes=self._lanes,
                grammars=self.grammars,
            )
        )
        self.metrics.attach(scheduler.tally, lambda: _gauges(scheduler, service))
        self._close_metrics = metrics.serve(
            self.metrics.registry, settings.host, settings.metrics_port
        )
        if simulation is not None:
            self.metrics.simulated(simulation.accept_length)
            _log.warning(
                "acceptance is simulated, the text means nothing",
                accept_length=simulation.accept_length,
                method=simulation.method.value,
                token_mode=simulation.tokens.value,
                clients_allowed=settings.simulate_allow_clients,
            )
        engine.start()
        self.engine = engine
        _log.info(
            "ready",
            model=target.name,
            ops=loaded.ops.name,
            precision=target.precision,
            context_length=target.context_length,
            kv_tokens=loaded.plan.kv_tokens,
            max_running=settings.max_running,
        )

    def _description(
        self, loaded: Loaded, offer: FeatureOffer, simulation: Simulation | None
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        settings, target = self.settings, loaded.target
        return verify_pb2.VerifyServiceDescribeResponse(
            model_id=target.name,
            vocab_size=target.vocab_size,
            tokenizer_digest=target.tokenizer_digest,
            context_length=target.context_length,
            max_nodes=settings.max_nodes,
            max_depth=settings.max_depth,
            max_trees=settings.max_trees,
            eos_token_ids=target.eos_token_ids,
            precision=target.precision,
            device=settings.device,
            max_running_sessions=settings.max_running,
            hidden_size=target.config.hidden_size,
            layer_count=target.config.num_layers,
            features=offer.message(),
            simulated=simulation_message(settings, simulation),
        )

    async def _watch(self, server: GrpcServer, service: VerifyService) -> None:
        """Health follows the engine: a step that does not end makes the replica NOT_SERVING."""
        assert self.engine is not None
        stalled = False
        while True:
            await asyncio.sleep(min(self.settings.stall_s * _WATCH_SHARE, _WATCH_MAX_S))
            snapshot = self.engine.snapshot()
            now_stalled = not snapshot.alive or snapshot.busy_s > self.settings.stall_s
            if now_stalled == stalled:
                continue
            stalled = now_stalled
            service.set_stalled(stalled)
            await server.set_serving(not stalled)
            if stalled:
                _log.error("engine stalled", alive=snapshot.alive, busy_s=snapshot.busy_s)
            else:
                _log.info("engine recovered")


def _nothing() -> None:
    """Closes the metrics of a replica that serves none."""


def _grammars(settings: VerifySettings, loaded: Loaded) -> Grammars | None:
    """What holds texts to grammars; None where that is off, or has no meaning."""
    target, limit_s = loaded.target, settings.grammar_compile_s
    if loaded.folder is None or not target.eos_token_ids or settings.simulate_accept_length:
        return None
    if not limit_s or not can_compile():
        return None
    vocabulary = Vocabulary(loaded.folder, target.vocab_size, target.eos_token_ids)
    return Grammars(vocabulary, limit_s)


def _gauges(scheduler: Scheduler, service: VerifyService) -> dict[str, int]:
    places = scheduler.places
    return {
        "running": len(places.running),
        "waiting": len(places.waiting),
        "free": places.pool.num_free,
        "used": places.pool.num_used,
        "cached": places.pool.num_cached,
        "dropped_streams": service.streams.num_dropped,
    }


def _seen(future: asyncio.Future[None]) -> None:
    """Nobody has to ask `ready`; a failure is in the log and in every answer."""
    if not future.cancelled():
        future.exception()
