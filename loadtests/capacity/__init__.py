"""The highest rate that a server takes: runs at several rates, and SLOs as multiples."""
