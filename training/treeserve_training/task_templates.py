"""Templates of tasks, with blanks that word lists fill."""

from __future__ import annotations

from treeserve_training.word_lists import entries, lines

LAYOUTS = (
    "{instruction}\n\n{text}",
    "{instruction}\n\n{text}",
    "{instruction}\n\n{text}",
    "{instruction}\n{text}",
    '{instruction}\n\n"{text}"',
    "{instruction}\n\nText: {text}",
    "{instruction}\n\n```\n{text}\n```",
    "{text}\n\n{instruction}",
    "Read the following text.\n\n{text}\n\n{instruction}",
)

MONTHS = entries("January, February, March, April, May, June, July, August, September, October, November, December")

TRANSLATION_LANGUAGES = entries("""
French, French, French, Spanish, Spanish, Spanish, German, German, German, English, English, Italian
""")

QUESTIONS = lines("""
What is {topic}?
Explain {topic} {style}.
Explain {topic} to {audience}.
Explain {topic} to {audience} {style}.
Tell me about {topic}.
Why is {word} important?
What are the main causes of problems with {word}?
How does {word} work?
What is the difference between {word} and {word}?
How are {word} and {word} connected?
Compare {word} with {word} {style}.
What should {audience} know about {topic}?
What do you know about {place}?
What is the capital of {country}, and what is it known for?
What is {country} famous for?
What languages are spoken in {country}?
Describe the climate of {country}.
Who discovered or invented {word}?
When did people begin to use {word}?
Give a definition of {word}.
Define {word} {style}.
What would happen if there were no {word}?
Is {word} good or bad for the environment?
Is it true that {word} can be dangerous?
Describe {topic} {style}.
What are the pros and cons of {word}?
Write a short essay about {topic}.
Write an introduction to {topic} for {audience}.
Discuss {topic} {style}.
What is the best way to learn about {topic}?
Give me an overview of {topic}.
I have to give a talk about {topic}. What should I say?
True or false: {word} existed a thousand years ago. Explain.
How many kinds of {word} are there?
What is the most important event in the history of {country}?
What does the word "{word}" mean? Use it in a sentence.
What do scientists say about {topic}?
""")

CHAT = lines("""
Hi! My name is {name}. Can we talk about {word}?
Hello, how are you today?
I'm feeling a bit sad because {situation}. What can I do?
My friend {name} says that {word} is overrated. What do you think?
I want to surprise {name} with something connected with {word}. Any ideas?
{situation}. What would you do?
I just moved to {place} and don't know anybody. How do I meet people?
I am planning a trip to {place} with {name}. What should we see?
I have {n} days in {country}. Where should I go?
My {n}-year-old loves {word}. What could we do together?
I can't decide between {activity} and {activity}. Help me choose.
What do you think about {topic}?
I have a job interview at a company that deals with {word}. How do I prepare?
I'm bored. Let's talk about {word}.
My boss wants me to write something about {topic}. Where do I start?
Let's play a game: you are {character} and I am {character}. You begin.
Pretend that you are a guide in {place} and welcome me.
Give me some advice: {situation}.
I would like to start {activity}. Do you have some tips for me?
I need a gift for {name}, who likes {word}. My budget is {number} dollars.
Tell me a joke about {word}.
Tell me something that I don't know about {word}.
What is your favourite fact about {word}?
What is a good question to ask somebody who knows a lot about {word}?
Do you prefer {word} or {word}?
Can you help me with {activity}?
I'm worried about {word}. Should I be?
I have {n} eggs, some flour and {word} in my kitchen. What can I cook?
""")

SITUATIONS = lines("""
my flatmate never cleans the kitchen
I failed an important exam
my neighbour plays loud music at night
I lost my wallet on a journey
my best friend moved to another country
I have too much work and too little time
my team does not listen to me
I forgot my mother's birthday
my computer is very slow
I spend too much money
I can't sleep at night
my dog barks at everybody
I have an argument with my sister
my plants keep dying
I was offered two jobs
my car broke down
my parents do not like my plans
I am afraid of flying
I said something stupid at a meeting
my son does not want to go to school
I want to eat healthier but I love sweets
my landlord raised the rent
I have to speak in front of a hundred people
I cannot concentrate when I study
a colleague takes the credit for my work
I got lost in a foreign city
my phone fell into the water
I want to change my career at forty
my train was cancelled
I have not talked to my brother for a year
""")

ACTIVITIES = entries("""
learning Spanish, learning the guitar, running a marathon, baking bread, growing tomatoes, writing a novel, painting
a wall, repairing a bicycle, saving money, organising a party, learning to swim, keeping a diary, cooking for a
large family, starting a blog, planning a wedding, training a dog, building a shelf, buying a used car, moving
house, cleaning the windows, losing weight, meditating, learning to code, taking better photos, studying for an
exam, sewing a dress, camping in the rain, brewing coffee, making soap, writing a CV, learning chess, reading more
books, waking up early, founding a company, negotiating a salary, choosing a laptop, growing herbs on a balcony,
raising chickens, making a film, removing a stain, setting up a home network, writing a speech, making friends,
drawing faces, learning to drive, making pasta by hand, wrapping a present, changing a tyre, painting with
watercolours, recording a podcast, folding a paper plane, making a budget, writing a cover letter, giving a
presentation, planting a tree, making jam, ironing a shirt
""")

STORIES = lines("""
Write a {genre} about {character}.
Write a {genre} about {character} who {event}.
Write a {genre} in which {character} {event} {setting}.
Write a {genre} that takes place {setting}.
Write a {genre} about {word}.
Write a {genre} about {name}, {character}, {setting}.
Write a {genre} about {name} and {name}, who meet {setting}.
Tell me a story about {character} and {character}.
Tell me a story in which {character} {event}.
Write the beginning of a story {setting}: {character} {event}.
Write the ending of a story in which {character} {event}.
Continue this story: "{name} was {character} who lived in {place}. One day,"
Continue this story: "It happened {setting}. {name} had never believed in {word}, but"
Write a poem about {word}.
Write a poem about {word} {setting}.
Write a short rhyme for children about {word} and {word}.
Describe a character: {character} in {place}.
Describe a scene {setting}.
Write a conversation between {character} and {character} about {word}.
Invent a legend that explains {word}.
Write song lyrics about {word} and {place}.
Come up with a plot for a film about {character} who {event}.
Write a {genre} with the words "{word}", "{word}" and "{word}".
""")

CODE = lines("""
Write a {language} function that {code_task}.
Write a {language} function that {code_task}. Add comments.
Write a {language} program that {code_task}.
Write {language} code that {code_task} and explain how it works.
How do I write a program in {language} that {code_task}?
Implement a function in {language} that {code_task}, and show an example of its use.
Write a class in {language} that {code_task}.
I need a short {language} script that {code_task}.
Write a {language} function that {code_task}, with a test.
Write a {language} function that {code_task}. Handle invalid input.
Give me only the code: a {language} function that {code_task}.
Can you show me how to write something in {language} that {code_task}?
""")

CODE_EDITS = lines("""
Add comments to this code.
Explain what this code does.
Explain this code line by line.
Rewrite this code in {language}.
Find the bugs in this code.
Improve this code and show the complete result.
Add error handling to this code.
Add a docstring to each function and print the complete code.
Rename the variables to something more meaningful and show the whole code.
Write tests for this code.
What is the time complexity of this code?
Simplify this code.
Change the code so that it also prints the result.
Repeat this code without comments.
Write a short README for this code.
What does this code print?
""")

SUMMARIES = lines("""
Summarize the following text.
Summarize the following text in one sentence.
Summarize this text in two sentences.
Summarize this in {n} bullet points.
Write a short summary of the text.
Write a summary of the following text for {audience}.
Give me the main idea of this text.
What is this text about? Answer in one or two sentences.
List the key points of the text.
Write a headline for this text.
Write a tweet that sums up this text.
tl;dr
Shorten the following text to half its length.
Write an abstract of this text.
Condense this text into a single paragraph.
What are the most important facts in this text?
Summarize this text {style}.
Give me a summary with a title.
What should I remember from this text?
""")

REWRITES = lines("""
Rewrite the following text in a formal tone.
Rewrite the following text in a casual tone.
Rewrite this text for {audience}.
Rewrite this text in the past tense.
Rewrite this text in the future tense.
Rewrite this text in the first person.
Rewrite this text in the third person.
Rewrite this text in your own words.
Paraphrase the following text.
Make this text easier to read.
Improve the style of this text.
Make the following text more lively.
Make the following text more polite.
Make this text sound more professional.
Rewrite this text in short sentences.
Rewrite this text so that it sounds positive.
Rewrite the text and change the place to {place}.
Rewrite the text and call the main person {name}.
Repeat the following text word for word.
Repeat the text, but leave out the last sentence.
Repeat the text and put every sentence on a line of its own.
Add a sentence about {word} at the end of this text and print the whole text.
Turn this text into a letter.
Turn this text into a poem.
Turn this text into a list.
Proofread this text and print the corrected version.
Expand the following text with more details.
Put the first sentence of this text at the end and print the whole text.
Write this text in British English.
""")

CORRECTIONS = lines("""
Correct the spelling mistakes in this text.
Correct all mistakes in the following text.
Fix the typos.
Fix the spelling and grammar of this text and print the corrected text only.
This text was typed in a hurry. Please correct it.
Please proofread this text.
Edit the following text for spelling and punctuation.
Find the spelling mistakes, then write the corrected text.
""")

REPLACEMENTS = lines("""
Replace the word "{old}" by "{new}" everywhere in the text.
Rewrite the text with "{new}" in place of "{old}".
Change "{old}" to "{new}" and print the complete text.
Print the text again, but every "{old}" should become "{new}".
""")

EXTRACTIONS = lines("""
List all names of people in the text.
List all places mentioned in the text.
Extract the names of people and places as a JSON object.
Extract the most important keywords as a list.
Extract the key facts as a JSON object.
Extract all numbers and dates from this text.
Which organisations are mentioned in this text?
Make a table of the facts in this text.
List all the nouns in the first sentence.
List the verbs in this text.
Extract five keywords and return them as a JSON array.
Return a JSON object with the keys "title", "topic" and "summary" for this text.
Return a JSON object with the keys "people", "places" and "events" for this text.
Who does what in this text? List it as "person: action".
Copy the sentence that is most important.
Copy the first and the last sentence of this text.
Extract all adjectives.
Fill in this form from the text: Name, Place, Subject, Problem, Next step.
Write down every question that the text answers.
""")

READING = lines("""
Who is the text about?
What is the main problem in the text?
Where does it take place?
What is the author's opinion about {word}?
Why was this text written?
Write {n} questions about the text.
Write three questions about the text and answer them.
Write a multiple-choice question about the text with four answers.
Does the text mention {word}? Quote the sentence if it does.
What happens at the end?
What do we learn about the main person?
Is the text positive or negative? Give reasons.
What could be added to the text?
Answer using only the text: what is said about {word}?
Write a short reply to this text.
What would be a good title, and why?
Do you agree with the text? Explain why or why not.
""")

ITEMS = entries("""
wooden chairs, blue mugs, notebooks, desk lamps, bicycles, rain jackets, running shoes, garden chairs, coffee
machines, headphones, backpacks, tents, cushions, frying pans, keyboards, monitors, winter coats, board games,
puzzles, guitars, teapots, blankets, suitcases, sunglasses, wristwatches, printers, candles, picture frames,
bookshelves, toasters
""")

RECORDS = lines("""
{full_name} from {place} ordered {n} {item} on {date} for {price} dollars.
Order {number}: {n} {item}, {price} EUR, to be delivered to {full_name}, {place}.
{full_name} ({place}), born on {date}, works with {word}.
On {date}, {full_name} gave a talk about {word} in {place}.
Meeting on {date} in {place}: {name} and {other} will discuss {word}.
Invoice {number}, dated {date}: {n} {item}, total {price} dollars, paid by {full_name}.
Flight {number} from {place} to {place} leaves on {date} with {number} passengers.
{name} scored {number} points, {other} scored {number} points.
{item}: {number} in stock, {price} dollars each, supplier {full_name}.
The museum of {word} in {place} was opened on {date} by {full_name}.
Room {n}: {full_name}, arrives on {date}, stays {n} nights, pays {price} dollars.
{country}: {number} members, chaired by {full_name} since {date}.
Name: {full_name}, city: {place}, hobby: {activity}.
Ticket {number}: {full_name} reports a problem with {item}, opened {date}.
""")

RECORD_TASKS = lines("""
List all names.
List all dates.
List the places, one per line.
Turn this into a JSON array of objects.
Turn this into a table.
Turn this into CSV with a header.
Extract the names and the places as JSON.
Extract name, date and amount for each entry.
Sort the entries by name.
Which entry has the highest number?
Write a sentence that sums this up.
Repeat the first entry exactly.
How many entries are there?
Convert each entry to the form "name - place".
Convert this to YAML.
Convert this to XML.
Write a short report about these entries.
""")

SENTENCES = lines("""
{name} and {other} went to {place} to learn about {word}.
I would like to book a table for {n} people on {date}.
The train from {place} to {place} is late because of {word}.
Yesterday I read a book about {word}, and I liked it very much.
Where can I buy {item} in {place}?
My name is {full_name} and I come from {country}.
We will meet in front of the museum at {n} o'clock.
The {item} cost {price} dollars, which is far too much.
Could you please send me the documents before {date}?
When I was a child, I was afraid of {word}.
{character} {event} {setting}.
It has been raining in {place} for {n} days.
The service was terrible and the food was cold. I will never come back to this restaurant.
I love these {item}! They arrived quickly and work perfectly.
Do you know why {word} is so important in {country}?
The doctor told {name} to drink more water and to think less about {word}.
{activity} takes time, but it is worth it.
Please turn off the lights when you leave the room.
She has been working as a teacher in {place} since {date}.
If I had more time, I would try {activity}.
The government of {country} has announced new rules for {word}.
There are {number} people in the hall, and most of them came because of {word}.
He forgot his keys again, so he had to wait for {name} in the cold.
Our company sells {item} and {item} in {country}.
How much does a ticket to {place} cost?
I am sorry, but I cannot come on {date} because {situation}.
""")

TRANSLATIONS = lines("""
Translate this into {translation}.
Translate the following text into {translation}.
Translate to {translation}:
How do you say this in {translation}?
Please translate the following sentence into {translation}.
Write this in {translation}.
Translate the text into {translation}, then back into English.
Translate this into French, Spanish and German.
Give me a formal {translation} translation of this.
Translate into {translation} and explain the difficult words.
I don't speak {translation}. Can you translate this for me?
""")

CLASSIFICATIONS = lines("""
Is the following text positive, negative or neutral?
Classify the sentiment of this text.
Classify this text as news, opinion, fiction or advertising. Explain your choice.
Which topic does this text belong to: science, sports, politics, culture or business?
Is this text formal or informal?
What emotion does the writer feel? Answer in one word.
Is this a question, a request or a statement?
What language is this text written in?
Is this spam? Answer yes or no and say why.
Rate the urgency of this message from 1 to 5.
Choose the best category: travel, food, work, family, health.
Does this text contain a complaint?
Who could have written this? Choose between a child, a teacher and a customer.
Label each sentence as fact or opinion.
Does the writer recommend it? Answer with yes or no.
""")

HOW_TOS = lines("""
How do I get started with {activity}?
Give me instructions for {activity} {style}.
Write a guide to {activity} for {audience}.
What are the steps of {activity}?
What do I need for {activity}?
Write a checklist for {activity}.
What mistakes should I avoid when {activity}?
Make a weekly plan for {activity}.
Make a plan for a day in {place}.
How can I explain {word} to {audience}?
How do I organise an event about {word} in {place}?
How do you take care of {word}?
How can I save money on {word}?
Write a recipe for a dish from {country} with {word}.
Write a tutorial about {word} for {audience}.
How do I write a report about {topic}?
Give me a lesson plan about {word} for {audience}.
How do I teach {audience} about {word}?
How can somebody in {place} learn more about {word}?
Explain {activity} {style}.
""")

LISTS = lines("""
List {n} facts about {word}.
List {n} ideas for {activity}.
Give me {n} names for a shop that sells {item}.
Give me {n} titles for a book about {character}.
List {n} things to do in {place}.
List {n} famous people from {country}.
Give me {n} questions about {topic}.
Write {n} quiz questions about {word} with answers.
List {n} synonyms of "{word}".
List {n} words that have to do with {word}.
Give me {n} reasons for and against {word}.
List {n} jobs that have to do with {word}.
Brainstorm {n} ideas for a project about {word}.
Suggest {n} slogans for {item}.
List {n} foods from {country} and describe each in one sentence.
Give me {n} tips for {activity}.
Name {n} books or films about {word}.
List {n} short sentences with the word "{word}".
Make a table with {n} rows about {word}: name, description, example.
Write a shopping list for {activity}.
""")

PROBLEMS = lines("""
{name} has {number} apples and gives {n} of them to {other}. How many are left?
A train travels {number} kilometres in {n} hours. How fast is it on average?
What is {number} plus {number}?
What is {number} minus {number}? Explain each step.
What is {number} times {n}?
Divide {number} by {n}. Show your work.
A shirt costs {price} dollars. In a sale it is {n} percent cheaper. What does it cost now?
{name} is {n} years older than {other}. Together they are {number} years old. How old are they?
A rectangle is {number} metres long and {n} metres wide. What are its area and its perimeter?
If {n} workers build a wall in {n} days, how long do {n} workers need?
Solve for x: {n}x + {number} = {number}.
Solve the equation {n}x - {n} = {number} step by step.
What is the next number in the sequence {n}, {n}, {n}, {n}?
{name} buys {n} {item} for {price} dollars each. How much does {name} pay?
What is {n} percent of {number}?
Convert {number} kilometres to miles.
Convert {number} degrees Fahrenheit to Celsius.
A bottle holds {n} litres. How many bottles are needed for {number} litres?
{name} runs {n} kilometres each day. How far is that in {n} weeks?
The average of {n}, {n} and {n} is what?
There are {n} red, {n} blue and {n} green balls in a bag. What is the probability of drawing a red one?
{name} starts work at {n} o'clock and works for {n} hours with a break of {number} minutes. When does the work end?
All {item} in the shop are cheap. This is one of the {item}. Is it cheap? Explain.
{name} is taller than {other}, and {other} is taller than {full_name}. Who is the tallest?
If it rains, {name} takes the bus. {name} did not take the bus today. Did it rain?
Three friends share {number} dollars so that each gets twice as much as the one before. How much does each get?
Is {number} a prime number? Explain how you know.
Find the factors of {number}.
Simplify the fraction {n}/{number}.
What is the square root of {number}, roughly?
Write {number} in words.
How many seconds are there in {n} hours?
A tank loses {n} litres of water per hour. It holds {number} litres. When is it empty?
Explain how to calculate {n} percent of {price} dollars.
Think step by step: {name} had {number} dollars, spent {n} on {item} and earned {number}. How much is there now?
""")

EMAIL_PURPOSES = lines("""
ask for a day off
apologise for a mistake
invite them to a party
cancel an appointment
ask for a refund
thank them for their help
apply for a job
complain about a delayed delivery
ask for more information about a course
announce a meeting
remind them of a deadline
congratulate them on a promotion
ask for a letter of recommendation
report a broken heater
introduce a new colleague
say goodbye on the last day of work
ask for feedback
offer a discount
decline an invitation
ask for the price of an order
confirm a booking
ask for help with a project
explain a delay
share some good news
suggest a trip together
ask whether a flat is still for rent
propose a new idea
ask for a raise
say that I am ill
request an interview for an article
""")

EMAIL_ADDRESSEES = entries("""
my boss, my landlord, a customer, a colleague, my team, my professor, a friend, my neighbour, the customer service,
a supplier, my grandmother, the school, a hotel, the city council, a business partner, my doctor, a recruiter, all
employees, an old classmate, the editor of a newspaper, my daughter's teacher, a museum
""")

EMAILS = lines("""
Write an e-mail to {addressee} to {purpose}.
Write a short e-mail to {addressee} to {purpose}.
Write a polite e-mail to {addressee} to {purpose}. Sign it as {full_name}.
Write a formal letter to {addressee} to {purpose}.
Help me to write an e-mail to {addressee}. I want to {purpose}.
Write an e-mail from {full_name} to {addressee} to {purpose}. Mention {word}.
Write a text message to {addressee} to {purpose}.
Write an e-mail to {addressee} about {topic}.
Write an e-mail to {addressee} to {purpose}. The meeting was planned for {date} in {place}.
Write a friendly reply to {addressee}, who asked about {word}.
Draft an e-mail with a subject line to {addressee} to {purpose}.
Write two versions of an e-mail to {addressee} to {purpose}: a formal and a casual one.
""")
