"""Runs the steps that the scheduler planned: inputs to the device, the model, the sampler."""

from forebay.runtime.build import build_runner
from forebay.runtime.model_runner import ModelRunner
from forebay.runtime.steps.launched import LaunchedStep

__all__ = ["LaunchedStep", "ModelRunner", "build_runner"]
