"""The project's own studies: sweeps over training runs, and reports. They need a checkout; no wheel contains them."""
