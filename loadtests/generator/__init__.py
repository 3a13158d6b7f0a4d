"""From a plan to records: sends what is scheduled, on Locust, and keeps what comes."""
