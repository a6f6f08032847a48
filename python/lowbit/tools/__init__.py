"""Measuring tools behind ``lowbit doctor``, ``bench``, ``report`` and ``eval``; not needed to run models."""
