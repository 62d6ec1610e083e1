"""Common English words for the names of needles, where wonderwords' lists are not given. Written for this package."""

_ADJECTIVES = """
able absent active actual aged alert amber ample ancient angry annual anxious apt arctic arid artful ashen autumn aware awkward
balanced bare basic bitter blank bleak blind blue blunt bold bony brave brief bright brisk brittle broad bronze brown busy calm
candid careful casual cautious central certain chief chilly civil classic clean clear clever close cloudy clumsy coarse coastal cold
common complex cool coral correct costly cosy crimson crisp crooked crude cruel curious current curved daily damp dapper dark dear
deep dense direct distant dizzy domestic double dry dull dusty eager early eastern easy elder electric elegant empty endless equal
even exact exotic extra faint fair famous fancy far fast fierce final fine firm fiscal flat fluent fluid fond foreign formal former
fragile frank free fresh frosty frozen full fuzzy general gentle giant gifted glad global glossy golden graceful grand grave gray
great green grim gritty handy happy hard harsh hasty heavy helpful hidden high hollow honest huge humble icy ideal idle inner iron
ivory jolly joyful keen kind large last late lavish lazy lean legal level light likely limber linen little lively local lonely long
loose loud loyal lucky lunar major marble marine meek mellow merry mild minor misty mobile modern modest moist moral mossy muddy
mutual narrow native neat nervous new nimble noble noisy northern novel oaken odd old olive open orange orderly outer oval pale
paper patient perfect plain playful polar polite prime private prompt proper proud public purple quaint quick quiet rapid rare raw
ready rear red regal remote rich rigid ripe robust rocky rosy rough round royal rural rusty sacred safe salty sandy scarlet secret
serene severe shady shallow sharp sheer short shrewd shy silent silken silver simple single sleek slender slim slow sly small smart
smooth snowy social soft solar solid somber sour southern spare sparse spicy stable stale stark steady steep stern stiff still
stormy stout strange strict strong sturdy subtle sudden sunny supple sweet swift tall tame tart tender tense thick thin thorny tidy
timid tiny tired tough tranquil true twin upper urban useful usual vacant vague vain valid vast velvet violet vital vivid warm wary
weak wealthy weary western wet white whole wide wild wise witty wooden woolly worthy yellow young
"""
_NOUNS = """
acorn actor address admiral airport alcove almond altar anchor ankle antler anvil apple apron arch archer arena armor arrow artist
atlas attic author autumn avenue badge badger baker balcony ballad bamboo banker banner barley barn barrel basin basket beach beacon
bead bean bear beaver bell belt bench berry bicycle bird biscuit blanket blossom boat bonnet book boot border bottle boulder bowl
branch bread breeze brick bridge broom brother brush bucket buffalo builder button cabin cable cactus camel camera canal candle
canoe canvas canyon captain caravan carpet carriage carrot castle cathedral cavern cedar cellar chair chalk chapel chapter cheese
cherry chest chimney church circle citadel clay cliff clinic clock cloud clover coast cobbler coffee coin collar comet compass
concert copper cork corner cottage cotton cousin cradle crane crater creek cricket crown crystal cupboard curtain cushion cypress
dagger dairy dancer daughter dawn deck deer desert desk diamond diary dinner doctor dolphin donkey door dove dragon drawer dress
drum duchess eagle editor elbow elephant elm emerald engine envelope estate falcon farmer father feather fence fern ferry festival
fiddle field finger fisher flag flame flute forest forge fork fort fossil fountain fox frame friend frost fruit furnace galaxy
gallery garden garlic garment gate geese gentleman ghost ginger giraffe glacier glove goat goblet gorge grain granite grape grass
guard guest guitar hammer harbor harp harvest hat hawk hazel heart hedge helmet herald heron highway hill hinge honey hook horizon
horse hospital hotel hound house hunter island ivy jacket jar jewel jockey journal judge jungle kettle keyboard kingdom kitchen kite
knight knot ladder lagoon lamp lantern lark lawyer leaf leather ledger lemon lens letter library lily lizard lobster locket lodge
loft magnet magpie manor mantle maple market marsh mason meadow medal melon merchant meteor miller mineral mirror mitten monarch
monkey moon mosaic moth mother motor mountain museum mushroom musician napkin needle nephew nest nickel night notebook novel nurse
oak oasis ocean office olive onion opera orchard orchid organ otter oven owl oyster paddle painter palace panther parade parcel park
parrot pasture path patrol peach peacock pearl pebble pencil penguin pepper piano picture pigeon pillow pilot pine pirate planet
plate platform plaza plow plum pocket poet pond pony poplar porch portrait postcard potter prairie prince printer prism pumpkin
puppet puzzle quarry queen quilt rabbit radio raft railway rainbow ranch raven reef ribbon ridge ring river road robin rocket
rooster rope rose ruby saddle sailor salmon sandal satchel saucer scholar school scissors scroll sculptor seagull seed shadow shark
shelf shell shepherd shield ship shore shovel signal singer sister skate slipper soldier song sparrow spider spoon square squirrel
stable staircase star station statue steeple stone stove stream street student summit sunset swallow swan sword table tailor tavern
teacher temple theater thicket thimble thread throne ticket tiger timber tower train trumpet tulip tunnel turkey turtle uncle valley
vase vessel village vineyard violin voyage wagon walnut walrus warden watch waterfall weaver whale wheel whistle willow window
winter wizard wolf workshop wren yacht zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
