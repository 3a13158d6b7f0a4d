"""From records to figures, plots and one HTML file."""
