"""What is sent, and when: sessions that follow from a plan and its seed."""
