"""The page that the demo's model reads, written for it, and what it is asked."""

TEXT = """\
The Lighthouse of Corran Head

Corran Head is a narrow tongue of rock on the north coast, and on its tip stands a lighthouse of grey granite. It \
was built in 1871, after the mail ship Petrel had run aground there on a winter night. The builder was an engineer \
named Agnes Moray. She had the stones cut inland and numbered, so that each one could be set in a single day \
between two tides. The tower is 38 metres high and has 192 steps.

For its first sixty years the lamp burned oil, which two keepers carried up the stairs every evening. The best \
known of them was Tobias Finch. He kept the light for thirty-one years and never missed a night. His only company \
was a one-eyed cat called Admiral, who slept beside the lamp because it was the warmest place on the rock. Tobias \
wrote down the weather three times a day in small blue notebooks. When he retired he left behind ninety of them, \
and scientists still use them to study how the storms of that coast have changed.

In 1932 the lamp was made electric. A cable was laid across the bay by the fishing boat Marigold, whose captain \
took no money for the work: the light had once led his father home in fog. Since then the lighthouse has shown two \
white flashes every fifteen seconds, and sailors can see them from a distance of 40 kilometres.

Today nobody lives in the tower. The light switches itself on at dusk, and a small computer reports to the harbour \
office if anything goes wrong. The old kitchen is a museum. Visitors can see the blue notebooks there, the brass \
oil cans, and a painting of Admiral asleep beside the lamp. The museum is open from May to September, and children \
who climb all the steps are given a wooden button with the picture of a cat.
"""

QUESTIONS = (
    "In which year was the lighthouse built?",
    "What was the name of the cat?",
    "How tall is the lighthouse?",
)
