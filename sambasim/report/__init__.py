"""Everything that is printed or written for people: tables, JSON records, charts, traces and HTML pages."""
