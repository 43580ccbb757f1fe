"""Word lists that the invented texts are built from."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ancient autumn bitter bold brave brief bright bronze calm careful cheerful clever cold common
    cosy crimson curious damp dark deep distant double dusty eager early eastern easy elder empty fair
    famous fierce final fine foggy formal fragile fresh friendly frosty gentle giant glad golden grand
    grateful great green handy happy hasty heavy hidden hollow honest humble hungry icy idle jolly kind
    large lazy light little lively lonely long loud lucky mellow merry mighty mild modern modest narrow
    neat nimble noble northern odd orange pale patient plain pleasant polite proud purple quick quiet
    rapid rare ready remote rich robust rough round royal rustic salty scarlet serious shallow sharp shiny
    short silent silver simple sleepy slender slow small smooth soft solid southern spare stable steady
    stormy strange strong sturdy subtle sudden sunny sweet swift tall tame tender thick thin thirsty tidy
    timid tiny tough tranquil upper urban useful vague vast velvet violet vivid warm western white wide
    wild wise witty wooden yellow young
    """
)

NOUNS = _words(
    """
    acorn alley anchor anvil apple apron arrow artist badge bakery balcony ballad banner barrel basket
    beacon beaver bell bench bicycle biscuit blanket blossom boat bottle bridge broom bucket butter button
    cabin camera candle canoe canvas carpet carrot castle cellar chapel cherry chimney circus clock cloud
    clover coat coffee comet compass copper corner cottage cotton cradle cricket crown cupboard curtain
    cushion daisy desert diary dolphin donkey door dragon drawer drum eagle engine envelope fabric falcon
    farmer feather fence ferry fiddle finger flag flame flute forest fountain fox garden garlic gate
    ginger glacier glove goblet goose granite grape guitar hammer harbor harvest hazel helmet heron hill
    honey horse island ivory jacket jewel juice kettle kitten ladder lagoon lamp lantern leaf lemon letter
    library lizard lobster locket magnet mango maple marble market meadow medal melon mirror monkey
    mountain museum napkin needle notebook oak ocean olive onion orchard otter oven owl paddle palace
    paper parrot pasture peach pebble pencil pepper piano picture pigeon pillow planet plum pocket pond
    poppy potato pumpkin puzzle rabbit raft ribbon river robin rocket saddle sailor salmon scarf school
    shadow shovel signal sparrow spider spoon squirrel station statue stone stove sugar summer table
    tailor temple thunder ticket tiger tower trumpet tulip tunnel turtle valley village violin wagon
    walnut water wheel whistle willow window winter wizard yacht
    """
)

FIRST_NAMES = _words(
    """
    Ada Alban Amara Anton Astrid Basil Bianca Boris Carla Cedric Clara Dario Delia Edgar Elena Emil Esther
    Fabian Felix Flora Gideon Greta Hannah Hector Helga Hugo Ida Igor Irene Ivan Jasper Jonas Judith Karim
    Lara Leon Linus Lucia Magnus Marta Milo Mona Nadia Nina Nora Olaf Olga Oscar Paula Petra Quentin
    Rafael Ramona Rosa Ruben Sabine Salma Selma Simon Sonia Stefan Tamara Thea Tobias Ulrich Vera Victor
    Wanda Xavier Yusuf Zelda Zora
    """
)

LAST_NAMES = _words(
    """
    Abbot Aldana Almeida Arden Bakker Barlow Bergman Blanco Brandt Calder Carver Castell Corbin Dahl
    Delgado Draper Ekman Ellery Farrow Fenwick Ferrer Fischer Forsyth Gallo Garrick Grimm Halden Hartley
    Holm Ibarra Jansen Keller Kimura Kovac Lambert Larkin Lindqvist Lorenz Madsen Mercer Moreau Navarro
    Nilsen Novak Okafor Olsen Pascal Pereira Quiroga Ramsey Rinaldi Rossi Santoro Sawyer Schubert Silva
    Sorensen Tanaka Thorne Ulloa Valente Varga Vogel Wagner Weaver Winslow Yamada Zeller
    """
)

TOWN_STARTS = _words(
    """
    Alder Ash Birch Black Bram Cold Corn Dun East Elm Fair Fern Glen Gold Gray Hazel High Iron Kings Lake
    Long Maple Marsh Mill Moor North Oak Pine Raven Red Rock Rose Salt Silver Spring Stone Sutter Thorn
    Wal West White Wind Winter Wolf
    """
)

TOWN_ENDS = (
    "berg",
    "bridge",
    "burg",
    "bury",
    "dale",
    "field",
    "ford",
    "gate",
    "haven",
    "mere",
    "mouth",
    "port",
    "ton",
    "wick",
)

PROFESSIONS = _words(
    """
    architect astronomer baker beekeeper biologist blacksmith botanist carpenter chemist composer dancer
    dentist engineer farmer florist geologist glassblower historian jeweler journalist judge lawyer
    librarian locksmith mechanic musician nurse painter pharmacist photographer pilot plumber poet potter
    printer sailor sculptor shoemaker surgeon surveyor tailor teacher translator watchmaker weaver
    """
)

HOBBIES = _words(
    """
    archery baking bowling calligraphy canoeing chess climbing cycling dancing drawing embroidery fencing
    fishing gardening hiking juggling karate kayaking knitting origami pottery rowing running sailing
    singing skating skiing sketching surfing swimming tennis woodcarving yoga
    """
)
