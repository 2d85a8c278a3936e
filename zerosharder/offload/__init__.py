"""Where bytes live: host memory today, tiers and pipelines with the issues that bring them."""
