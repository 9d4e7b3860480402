"""The words that prompts are made of.

256 short and common English words, so that one byte chooses one of them. Each, at the start of a text and after a
space, is one token in the vocabularies of GPT-2, GPT-NeoX, MPT, Falcon, StarCoder, Refact, SmolLM2, Llama 2 and 3,
Phi-3, Qwen 2 and 3.5, Gemma, Command-R and DeepSeek (looked up in the vocabulary files of llama.cpp's tests);
`workload.realise` asks the endpoint itself.
"""

_TEXT = """
    the of and to in is that for it with as was on be at by this had not are but from or have an they which one
    you all her she there would their we him been has when who will no more if out so up what its about than into
    them can only other time new some could these two may first then do any like my now over such our man me even
    most made after also did many off before must well back through years where your way down should because long
    each just state people too how little good world make very year still see own work men day get here old
    between both life being under three never know same last another while us great since go right take used house
    use during without again place around home small found part school thought say general once upon war every
    left don got does number hand course water until always away public fact less put think almost head far yes
    system set better nothing night end why called find going look later next program city give group days let
    room young word side point things order present large given face second early white case big best need four
    within mind power light line family country done half open five human social body form name above action local
    field door kind words keep car tell free level history known mean money able week air matter child help held
    love land force
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
