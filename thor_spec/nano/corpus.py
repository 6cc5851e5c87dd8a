"""A page of prose: the bigram statistics behind the tiny targets, their training text, and the seeds of prompts."""

# ASCII only, so that a target which follows it writes valid UTF-8. Short, so that a few seconds of training suffice to
# learn it by heart. No blank follows a blank: between its tokens JSON allows any number of them, and a model that has
# seen runs of blanks fills such a gap without end when a grammar forbids what it would rather say.
TEXT = """\
A small model writes the first words of a line, and a large one reads them all at once. When both agree, several words
are kept for the price of a single step. When they differ, the large model has the last word, so nothing is lost but a
little work. This is how a quick guess can serve a careful judge.
The river bends twice before it meets the old mill. In spring the water is high and brown, and boys from the village
throw sticks from the bridge to see which one comes out first on the other side.
def area(width, height):
\tassert width > 0 and height > 0, "sides must be positive"
\treturn width * height
{"name": "get_temperature", "arguments": {"unit": "celsius"}}
{"name": "set_light", "arguments": {"on": true, "room": "attic"}}
{"name": "get_temperature", "arguments": {"unit": "fahrenheit"}}
{"name": "set_light", "arguments": {"on": false, "room": "hall"}}
Every morning Quinn walked to the market to buy six eggs, a loaf of bread, and a jar of fig jam. "Just the usual?" asked
the grocer, and Quinn would nod, put five coins on the counter, and say that the weather was about to change.
What does a machine remember? Some keep every page they have read. Others keep one sheet, rub out a part of it for each
new sentence, and write the gist in its place. The first kind grows heavy; the second forgets.
- Check the voltage before you connect the board.
- Keep the fan clear of dust; it spins at 1200 rpm.
{"name": "get_temperature", "arguments": {"unit": "celsius"}}
{"name": "set_light", "arguments": {"on": true, "room": "hall"}}
The answer to 12 + 30 is 42. The answer to 9 * 9 is 81. A week has 7 days, a year has 365, and an hour has 60 minutes.
"""
