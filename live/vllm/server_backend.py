"""A model in vLLM's server, for `twin validate --engine vllm --clock wall`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from live.validation.backend import IN_TURNS_SEED, Requests, clients_of, profiling_limits
from live.validation.profiling import ProfilingResult
from live.validation.replay import ReplayResult
from live.vllm.backend import VllmBackend, engine_arguments
from live.vllm.server import MODEL, VllmServer
from live.vllm.server_runs import ServerProfile, replay_served
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec, ValidationScenario
from workloads.json_files import read_json_object


class VllmServerBackend(VllmBackend):
    """One model in a server of vLLM, started when it is first needed and ended by `close`.

    With `profiling.in_turns`, rounds of other requests precede each replay.
    """

    def __init__(self, scenario: ValidationScenario, base: Path, device: str) -> None:
        super().__init__(scenario, base, device)
        self._server: VllmServer | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._between: ServerProfile | None = None

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfilingResult:
        """Time steps of random requests."""
        return self._profile(scheduler, spec, seed).run(spec.rounds)

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayResult:
        """Send each request to an idle server at its arrival time, and turns of sessions after their answers."""
        server = self._running(scheduler)
        spec = self._scenario.profiling
        profiled = None
        if spec.in_turns:
            if self._between is None:
                self._between = self._profile(scheduler, spec, IN_TURNS_SEED)
            profiled = self._between.run(-(-spec.rounds // (len(self._scenario.loads) * self._scenario.repeats)))
        server.reset_prefix_cache()
        clients = clients_of(requests, self._vocabulary, scheduler.config.prefix_id_tokens)
        return replay_served(server, clients, profiled)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    def _profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ServerProfile:
        server, limits = self._running(scheduler), profiling_limits(scheduler, spec)
        profile = ServerProfile(server, self._vocabulary, limits, scheduler.config.block_size, seed)
        profile.warm_up()
        return profile

    def _running(self, scheduler: SchedulerPlan) -> VllmServer:
        if self._server is None:
            folder = Path(self._folder.name)
            log = folder / "steps.csv"
            arguments = engine_arguments(
                self._scenario, scheduler.config, self._base, folder, step_log=str(log), clock="wall"
            ) | {"served_model_name": MODEL, "enable_prompt_tokens_details": True, "disable_log_stats": True}
            if self._device == "cpu":
                arguments["enforce_eager"] = True
            self._vocabulary = int(read_json_object(Path(arguments["model"]) / "config.json")["vocab_size"])
            self._server = VllmServer(arguments, self._scenario.model.threads, log)
        return self._server
