"""Tests of the toolkit and of its passes."""
