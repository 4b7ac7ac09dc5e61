"""Pages for a browser: the run's report, the preview, charts; Jinja templates without outside resources."""
