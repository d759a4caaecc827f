"""Measure runs of reasoning; see `measures.mathematics`."""

from evoalign_study.measures.mathematics import Sets

MEASURES = Sets("reasoning")
