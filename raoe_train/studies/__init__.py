"""This project's own laboratory: sweeps, reports, analyses. On public names; nothing imports it."""
