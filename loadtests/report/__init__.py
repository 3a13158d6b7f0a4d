"""Reports: records become figures, plots and one HTML file."""
