"""The pytest plugin `ranks`: a test body on several real processes. Light: torch comes with the first marked test."""
