"""The accelerators of a run, real or planned for, asked of the driver: nothing is started on them."""

from llamafactory_preflight.device.card import Device, Kind, smallest
from llamafactory_preflight.device.planned import CARDS, planned, sold_alike
from llamafactory_preflight.device.processes import Process
from llamafactory_preflight.device.survey import Survey, survey, visible


__all__ = ["CARDS", "Device", "Kind", "Process", "Survey", "planned", "smallest", "sold_alike", "survey", "visible"]
