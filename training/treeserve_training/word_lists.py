"""Word lists that prompts are combined from."""

from __future__ import annotations


def entries(text: str) -> tuple[str, ...]:
    """Comma-separated entries, whatever the line breaks."""
    return tuple(entry for part in text.split(",") if (entry := " ".join(part.split())))


def lines(text: str) -> tuple[str, ...]:
    """One entry a line."""
    return tuple(line for part in text.splitlines() if (line := part.strip()))


TOPICS = entries("""
photosynthesis, black holes, plate tectonics, vaccines, the water cycle, coral reefs, antibiotics, gravity, magnets,
the immune system, batteries, lightning, volcanoes, earthquakes, tides, rainbows, fossils, dinosaurs, mammoths,
bees, ants, butterflies, owls, penguins, dolphins, whales, sharks, octopuses, elephants, wolves, bears, horses,
dogs, rabbits, hedgehogs, snakes, frogs, spiders, mushrooms, mosses, ferns, oak trees, bamboo, roses, orchids,
cacti, tomatoes, potatoes, rice, wheat, maize, olives, grapes, apples, bananas, strawberries, garlic, onions,
chillies, cinnamon, vanilla, salt, sugar, honey, butter, cheese, yoghurt, bread, pasta, pizza, soup, salad,
pancakes, chocolate, coffee, tea, wine, beer, lemonade, olive oil, vinegar, tofu, lentils, school lunches, street
food, picnics, barbecues, fasting, vegetarian diets, food allergies, nutrition labels, sleep, dreams, memory,
attention, stress, anxiety, loneliness, friendship, marriage, parenting, grandparents, adoption, twins, teenagers,
retirement, grief, humour, laughter, gossip, politeness, lying, forgiveness, jealousy, gratitude, courage, patience,
curiosity, boredom, ambition, perfectionism, procrastination, habits, time management, meditation, yoga, running,
swimming, cycling, football, basketball, tennis, cricket, rugby, volleyball, skiing, snowboarding, surfing,
climbing, hiking, sailing, rowing, boxing, judo, fencing, archery, golf, gymnastics, dancing, ballet, the Olympic
Games, chess, card games, board games, crossword puzzles, video games, kites, juggling, magic tricks, knitting,
sewing, pottery, woodworking, origami, calligraphy, photography, painting, sculpture, architecture, cathedrals,
castles, bridges, tunnels, skyscrapers, lighthouses, windmills, dams, canals, harbours, airports, railways, trams,
buses, bicycles, motorcycles, electric cars, lorries, ships, submarines, helicopters, aeroplanes, rockets,
satellites, space stations, the Moon, Mars, Jupiter, Saturn's rings, comets, asteroids, the Sun, galaxies,
telescopes, microscopes, lasers, radar, X-rays, thermometers, clocks, calendars, compasses, maps, globes, paper,
printing, books, libraries, newspapers, radio, television, cinema, theatre, opera, jazz, rock music, folk songs,
choirs, orchestras, violins, pianos, guitars, drums, flutes, the Internet, search engines, e-mail, social media,
passwords, encryption, computer viruses, databases, programming languages, algorithms, machine learning, robots, 3D
printers, drones, smartphones, keyboards, cloud computing, open-source software, spreadsheets, algebra, geometry,
fractions, percentages, probability, statistics, prime numbers, infinity, the number zero, graphs, logic puzzles,
money, inflation, taxes, interest rates, banks, insurance, shares, pensions, budgets, debt, trade, tariffs, unions,
minimum wages, unemployment, start-ups, advertising, brands, supermarkets, second-hand shops, farmers' markets,
recycling, compost, plastic, glass, steel, concrete, wood, leather, cotton, wool, silk, diamonds, gold, copper, oil,
natural gas, coal, nuclear power, wind power, solar panels, hydropower, insulation, heat pumps, electricity grids,
climate change, deserts, rainforests, wetlands, glaciers, rivers, lakes, islands, mountains, caves, beaches,
forests, national parks, zoos, gardens, cities, villages, suburbs, slums, apartment buildings, public parks,
playgrounds, schools, universities, exams, homework, homeschooling, scholarships, teachers, nurses, doctors,
dentists, surgeons, pharmacists, lawyers, judges, police officers, firefighters, soldiers, pilots, sailors, farmers,
bakers, butchers, chefs, waiters, plumbers, electricians, carpenters, engineers, scientists, journalists,
translators, poets, novelists, democracy, elections, parliaments, constitutions, monarchies, dictatorships, human
rights, slavery, colonialism, revolutions, the Roman Empire, ancient Egypt, ancient Greece, the Vikings, the Silk
Road, the Middle Ages, the Renaissance, the Industrial Revolution, the First World War, the Second World War, the
Cold War, the Berlin Wall, the printing press, the Great Wall of China, the pyramids, samurai, pirates, knights, the
Black Death, the moon landing, Shakespeare, Mozart, Leonardo da Vinci, Marie Curie, Isaac Newton, Albert Einstein,
Charles Darwin, Cleopatra, Napoleon, Nelson Mandela, Mahatma Gandhi, philosophy, ethics, free will, happiness,
justice, religion, myths, fairy tales, festivals, weddings, birthdays, funerals, tattoos, fashion, shoes, hats,
umbrellas, perfume, soap, mirrors, chairs, beds, kitchens, bathrooms, refrigerators, vacuum cleaners, washing
machines, candles, fireworks, toys, dolls, teddy bears, languages, alphabets, grammar, accents, sign language,
dictionaries, proverbs, names, handwriting, spelling, letters, diaries, museums, archaeology, genealogy,
volunteering, charities, blood donation, organ transplants, first aid, broken bones, headaches, the common cold,
diabetes, asthma, heart disease, cancer screening, eyesight, hearing, teeth, skin, hair, bones, muscles, the brain,
the heart, the lungs, the liver, the stomach, blood, hormones, genes, cells, bacteria, viruses, parasites,
evolution, extinction, endangered species, migration of birds, hibernation, camouflage, pollination, seeds, soil,
fertilisers, irrigation, greenhouses, fishing, beekeeping, sheep farming, dairy farms, pets, guide dogs, horse
racing, bull fighting, hunting, camping, travel, passports, tourism, hotels, hitchhiking, packing a suitcase, jet
lag, homesickness, remote work, job interviews, public speaking, meetings, negotiations, teamwork, leadership,
feedback, deadlines, promotions, workplace conflicts, salaries, business cards, contracts, copyright, patents,
privacy, surveillance, fake news, censorship, juries, prisons, traffic lights, speed limits, car accidents, parking,
noise, light pollution, air pollution, floods, droughts, hurricanes, tornadoes, snow, fog, clouds, wind, seasons,
thunderstorms, avalanches, wildfires, tsunamis
""")

ASPECTS = lines("""
{}
the history of {}
the future of {}
the advantages and disadvantages of {}
common misconceptions about {}
the basics of {}
interesting facts about {}
the importance of {}
the science behind {}
the role of {} in everyday life
the economics of {}
how children learn about {}
the cultural meaning of {}
the most surprising thing about {}
the environmental impact of {}
a beginner's view of {}
{} around the world
{} a hundred years ago
problems connected with {}
how people talk about {}
{} and the law
{} in literature and film
the vocabulary of {}
what experts disagree on when it comes to {}
""")

AUDIENCES = entries("""
a child, a beginner, a student, a busy manager, an expert, a tourist, my grandmother, a teenager, a new employee, a
teacher, a journalist, a farmer, a patient, an engineer, a friend who is sceptical, a classroom of ten-year-olds, a
small business owner
""")

STYLES = entries("""
in simple words, in a formal tone, in a friendly tone, in one paragraph, in three sentences, in a few short
paragraphs, as a bulleted list, as a numbered list, with an example, with two examples, briefly, in detail, step by
step, with a bit of humour, as a dialogue, as a short speech, as if you were a radio host, without technical terms,
in about 100 words, with an analogy, as questions and answers, in plain English, with a short introduction and a
conclusion, as a table
""")

FIRST_NAMES = entries("""
Anna, Ben, Clara, David, Elena, Farid, Grace, Hassan, Ines, Jack, Kofi, Laura, Mehmet, Nina, Oscar, Priya, Quentin,
Rosa, Samuel, Tara, Umar, Vera, William, Xin, Yusuf, Zoe, Amara, Boris, Chloe, Diego, Emma, Felix, Gita, Henry,
Ivan, Julia, Karim, Leila, Marco, Naomi, Olga, Pedro, Rahul, Sofia, Tom, Ursula, Viktor, Wendy, Yara, Akira, Bianca,
Carlos, Daphne, Eric, Fatima, George, Hanna, Isaac, Jana, Kenji, Lucy, Martin, Noor, Otto, Paula, Robert, Sarah,
Theo, Valerie
""")

LAST_NAMES = entries("""
Adams, Baker, Chen, Diaz, Evans, Fischer, Garcia, Haddad, Ito, Jensen, Khan, Lopez, Meyer, Nguyen, Olsen, Patel,
Quinn, Rossi, Smith, Tanaka, Usman, Vogel, Walker, Xu, Young, Zhang, Brown, Carter, Dubois, Eriksson, Ferrari,
Green, Hansen, Ivanova, Johnson, Kowalski, Larsen, Moreau, Novak, Okafor, Petrov, Roberts, Santos, Taylor, Weber,
Williams, Murphy
""")

PLACES = entries("""
Amsterdam, Athens, Bangkok, Barcelona, Beijing, Berlin, Bogota, Boston, Brussels, Budapest, Buenos Aires, Cairo,
Cape Town, Chicago, Copenhagen, Delhi, Dublin, Edinburgh, Florence, Geneva, Hamburg, Hanoi, Helsinki, Hong Kong,
Istanbul, Jakarta, Johannesburg, Kyoto, Lagos, Lima, Liverpool, London, Los Angeles, Lyon, Madrid, Manila,
Melbourne, Mexico City, Milan, Montreal, Moscow, Mumbai, Munich, Nairobi, Naples, New York, Oslo, Paris, Prague,
Quebec, Reykjavik, Rio de Janeiro, Rome, San Francisco, Santiago, Seattle, Seoul, Shanghai, Singapore, Stockholm,
Sydney, Tokyo, Toronto, Valencia, Vancouver, Venice, Vienna, Warsaw, Wellington, Zurich, a small village in the
Alps, a fishing port, a town by the river
""")

COUNTRIES = entries("""
Argentina, Australia, Austria, Bangladesh, Belgium, Bolivia, Brazil, Canada, Chile, China, Colombia, Cuba, Denmark,
Egypt, Ethiopia, Finland, France, Germany, Ghana, Greece, Hungary, Iceland, India, Indonesia, Iran, Ireland, Israel,
Italy, Jamaica, Japan, Jordan, Kenya, Madagascar, Malaysia, Mexico, Mongolia, Morocco, Nepal, the Netherlands, New
Zealand, Nigeria, Norway, Pakistan, Peru, the Philippines, Poland, Portugal, Romania, Russia, Saudi Arabia, Senegal,
South Africa, South Korea, Spain, Sri Lanka, Sweden, Switzerland, Tanzania, Thailand, Tunisia, Turkey, Uganda,
Ukraine, the United Kingdom, the United States, Uruguay, Vietnam, Zambia
""")

CHARACTERS = entries("""
a young baker, a retired sea captain, a shy librarian, a talking cat, a lost robot, a clever thief, a lonely giant,
a travelling musician, a princess who hates dresses, a boy with a wooden leg, a girl who can hear plants, an old
watchmaker, a nervous dragon, a night nurse, a street painter, a homesick astronaut, a failed magician, a village
doctor, a taxi driver, a ghost who is afraid of people, two sisters, a stubborn goat, a blind pianist, a chess
champion, a school caretaker, a spy who wants to retire, a queen without a country, a mountain guide, a beekeeper, a
postman, a forgetful professor, a runaway apprentice, a very small elephant, a fisherman's daughter, a detective
with a bad cold, a cook on a pirate ship, twin brothers, a gardener in a palace, a scarecrow, a snowman in July, a
knight who cannot ride, an inventor, a tired superhero, a substitute teacher, a wolf who is a vegetarian, a museum
guard, a puppet, a train conductor, a shepherd, a young judge, the last speaker of a language, a kite maker, a rat
who lives in a theatre
""")

EVENTS = entries("""
finds a mysterious key, gets lost in a storm, receives a strange letter, discovers a hidden door, makes an unlikely
friend, must deliver a parcel, loses something precious, hears a secret, enters a contest, breaks a promise, wakes
up in the wrong city, finds an abandoned ship, saves a stranger, is accused of a crime, inherits an old house,
learns to swim, meets an old enemy, plants a strange seed, misses the last train, repairs a broken toy, wins the
lottery, must tell the truth, builds a flying machine, searches for a missing brother, is invited to a strange
dinner, finds a map, hears music from under the ground, opens a small shop, has to cross a desert, becomes invisible
for a day, finds a book that writes itself, must choose between two friends, learns a forgotten recipe, is followed
by a shadow, faces a great fear, returns home after ten years, steals a painting, rescues a wounded bird, forgets an
important name, sees the sea for the first time, trades places with a king, breaks a spell, stays awake for three
nights, organises a festival
""")

SETTINGS = entries("""
on a rainy evening, in a quiet village, in a city under the sea, on a distant planet, in an old castle, during a
long winter, in a crowded market, on a small island, in a forest at night, in the year 3000, in a school, at a
railway station, in the desert, on a ship, in a hospital, in a library, in a dream, in ancient Rome, on a farm, at
the top of a tower, in a circus, in a museum after closing time, in a kitchen, in a submarine, on the first day of
spring, in a town without clocks
""")

GENRES = entries("""
short story, fairy tale, ghost story, love story, science fiction story, detective story, adventure story, fable
with a moral, bedtime story, funny story, sad story, scene for a play, poem, rhyming poem, haiku, song, limerick,
diary entry, monologue, letter from one character to another, opening paragraph of a novel, legend, mystery,
dialogue
""")

LANGUAGES = entries("""
Python, Python, Python, Python, JavaScript, JavaScript, TypeScript, Java, C, C++, C#, Go, Rust, Ruby, PHP, Swift,
Kotlin, R, Bash, Lua
""")

CODE_TASKS = lines("""
checks whether a number is prime
returns the n-th Fibonacci number
reverses a string
counts the vowels in a string
checks whether a string is a palindrome
computes the factorial of a number
finds the largest element of a list
finds the second largest element of a list
removes duplicates from a list
sorts a list of numbers with bubble sort
sorts a list with quicksort
sorts a list with insertion sort
performs a binary search in a sorted list
computes the greatest common divisor of two numbers
converts a decimal number to binary
converts a Roman numeral to an integer
converts Celsius to Fahrenheit
counts how often each word occurs in a text
finds the longest word in a sentence
capitalises the first letter of every word
checks whether two strings are anagrams
flattens a nested list
computes the sum of the digits of a number
computes the average of a list of numbers
computes the median of a list of numbers
transposes a matrix
multiplies two matrices
rotates a list by k positions
finds all pairs of numbers that add up to a target
generates a random password
validates an e-mail address
validates a phone number with a regular expression
reads a CSV file and prints the rows
writes a list of dictionaries to a JSON file
parses a JSON string and prints one field
counts the lines of a text file
finds the most common letter in a text
implements a stack with push and pop
implements a queue
implements a singly linked list with insert and delete
reverses a linked list
implements a binary search tree with insert and search
traverses a binary tree in order
computes the height of a binary tree
performs a breadth-first search in a graph
performs a depth-first search in a graph
finds the shortest path with Dijkstra's algorithm
detects a cycle in a graph
solves the Towers of Hanoi
generates all permutations of a list
generates all subsets of a set
computes the power of a number recursively
checks whether brackets are balanced
evaluates an arithmetic expression
simulates rolling two dice
plays rock, paper, scissors against the user
asks the user to guess a number
prints a multiplication table
prints a triangle of stars
prints FizzBuzz for the numbers from 1 to 100
computes the number of days between two dates
checks whether a year is a leap year
formats a number with thousands separators
computes compound interest
models a bank account with deposits and withdrawals
models a rectangle with area and perimeter
models a shopping cart with a total
models a student with a list of grades
models an employee with a yearly raise
manages a to-do list
stores contacts in a dictionary
counts inversions in a list
finds the longest common prefix of some strings
finds the longest common subsequence of two strings
computes the edit distance of two strings
compresses a string by run-length encoding
encrypts a text with the Caesar cipher
splits a list into chunks of a given size
merges two dictionaries
inverts a dictionary
groups words by their first letter
filters the even numbers of a list
maps a list of names to upper case
downloads a web page and prints its title
sends an HTTP request and handles errors
retries an operation three times
measures how long a function takes
reads numbers from the user until an empty line
logs messages with a time stamp
caches the results of an expensive function
connects to a SQLite database and lists a table
creates a table of users with SQL and inserts a row
draws a bar chart of monthly sales
computes the standard deviation of some numbers
estimates pi with random points
plays tic-tac-toe on the console
converts a string from snake case to camel case
truncates a long text and adds an ellipsis
finds the missing number in a sequence
checks a Sudoku row for duplicates
computes the dot product of two vectors
counts islands in a grid
finds the maximum sum of a contiguous subarray
computes a moving average
finds the k most frequent elements
toggles a class when a button is clicked
shows the current time and updates it every second
validates a form before it is submitted
creates a simple web server that answers with a greeting
defines a REST endpoint that returns a list of items
""")

PASSAGE_FORMS = lines("""
Write a short encyclopedia paragraph about {topic}.
Write a paragraph about {topic} for a school book.
Write a short news article about {topic} in {place}.
Write a paragraph in which {name} talks about {topic}.
Write a short biography of an invented person called {full_name} from {place} who is known for {topic}.
Write a short e-mail from {full_name} to {other} about {topic}.
Write a customer review of a product connected with {topic}.
Write a negative review of a restaurant in {place}.
Write a positive review of a hotel in {place}.
Write the minutes of a short meeting about {topic} with {name}, {other} and a manager.
Write a short travel report about {place}.
Write a diary entry by {name} in {place} about {topic}.
Write a short story in which {character} {event}.
Write a short dialogue between {name} and {other} about {topic}.
Write a press release about a new company in {place} that deals with {topic}.
Write a short essay on {topic}.
Write an announcement of an event in {place} about {topic}, with date, time and location.
Write a complaint letter from {full_name} about {topic}.
Write a paragraph describing an ordinary day of {name}, who works in {place}.
Write a paragraph with facts and figures about {country}.
Write a short report on a problem with {topic} and how it was solved.
Write a short product description of something useful for {topic}.
Write a forum post in which somebody asks for advice about {topic}.
Write a short scientific abstract about {topic}.
Write five sentences about {topic}.
Write a weather report for {place}.
Write a short speech about {topic}.
Write a recipe from {country} with ingredients and steps.
""")

SYSTEM_PROMPTS = lines("""
You are a helpful assistant.
You are a helpful AI assistant.
You are a friendly assistant who answers briefly.
You are a careful assistant who explains every step.
You are an expert in {topic}.
You are a teacher who explains {topic} to students.
You are an experienced programmer who writes clean code.
You are a creative writer.
You are a poet.
You are a professional editor.
You are a translator.
You are a mathematics tutor.
You are a history professor.
You are a doctor who explains things to patients.
You are a lawyer who explains the law in plain words.
You are a travel guide from {place}.
You are a chef from {country}.
You are a customer service agent of a shop.
You are a personal trainer.
You are a career adviser.
You are a financial adviser.
You are a scientist who likes {topic}.
You are a journalist in {place}.
You are a children's book author.
You are a data analyst. Answer in a structured way.
You are a sales manager.
You are an assistant for small businesses.
You are a patient language teacher.
You answer questions about {topic} for {audience}.
You extract information from texts and answer only with the result.
You write e-mails for busy people.
You are a knowledgeable and concise assistant. Use lists where they help.
Answer {style}.
Always be polite and answer {style}.
""")

# Beginnings of a user's message that the model itself continues. Empty: it writes all of it.
OPENINGS = lines("""
What
What is the
What are the
What are some
Why
Why do
How
How do I
How can I
How does
Can you
Can you explain
Could you
Could you help me
Please
Please write
I
I am
I am looking for
I need
I want to
I have a
I'm writing
I'm trying to
My
We are
Write
Write a
Write a Python
Create
Explain
Describe
Give me
List
Tell me
Suggest
Summarize
Rewrite
Translate
Compare
Imagine
In
Is it
Are there
Do
Should
Which
Who
When
Where
Given
Here is
Generate
Design
Let's
As a
If
The
A
Find
Solve
""")

FOLLOW_UPS = lines("""
Can you give me an example?
Can you explain that in simpler words?
Why is that?
Please make it shorter.
Please make it longer and more detailed.
Can you rewrite that in a more formal tone?
Can you rewrite that in a more casual tone?
Summarize your answer in one sentence.
Turn your answer into a bulleted list.
What are the disadvantages?
What else should I know?
Are you sure? Please check your answer.
Thanks! What would you recommend to a beginner?
Can you translate that into French?
Can you translate that into Spanish?
Can you translate that into German?
What is the most important point?
How would you explain this to a child?
Give me three questions that I could ask about this.
Can you continue?
What happens next?
How long would that take?
How much would that cost?
Could you say more about the first point?
Could you say more about the last point?
I don't understand. Please explain it again in other words.
What do critics say about it?
Is there an alternative?
Can you write a short poem about it?
Write an e-mail to a friend about this.
Write a title for this.
Give me five keywords.
Now write it from another point of view.
What mistakes do people usually make here?
Can you add some numbers or facts?
Where can I learn more?
Is this also true in {country}?
Was it the same a hundred years ago?
How is this related to {topic}?
Now tell me about {topic} instead.
Put the key facts into a JSON object.
Which of these is the easiest?
Please repeat your answer without the introduction.
Fix any spelling and grammar mistakes in your answer.
Thank you. That was helpful!
""")
