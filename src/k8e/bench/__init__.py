"""Measuring: samples, tables and the small suite behind ``k8e bench``."""
