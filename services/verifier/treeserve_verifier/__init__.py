"""The verifier: owns the target model and the committed prefix, and checks token trees."""
