"""The rules of scripts/check-language: what to refuse, what to say instead, examples, and where a rule applies.

name    a sequence of words inside an identifier, or a whole identifier between ^ and $
code    a regular expression for code
phrase  a regular expression for prose in lower case; a space stands for any white space, with at most one line break

A word with an ordinary meaning is refused only in the folders where it was a private term.
"""

import collections

Rule = collections.namedtuple("Rule", "kind pattern say bad good only")

# Files that a rule applies to: globs in which * also matches a slash; one that starts with ! excludes files.
CODE = "* !docs/* !*.md"
SOURCE = "src/* bench/gpu/*.cu bench/gpu/*.cuh"
CUDA = "src/cuda/* bench/gpu/*.cu bench/gpu/*.cuh"
GPU_PROSE = "src/* bench/* docs/* README.md include/* python/* !docs/lab/*"
TEXT = "* !docs/lab/*"
LAB = "*"
NAMES = "* !docs/lab/* !docs/glossary.md !CHANGELOG.md"


def name(pattern: str, say: str, bad: str, good: str, only: str = NAMES) -> Rule:
    return Rule("name", pattern, say, bad, good, only)


def code(pattern: str, say: str, bad: str, good: str, only: str = CODE) -> Rule:
    return Rule("code", pattern, say, bad, good, only)


def phrase(pattern: str, say: str, bad: str, good: str, only: str = TEXT) -> Rule:
    return Rule("phrase", pattern, say, bad, good, only)


DIGITS = r"[0-9](?:[0-9,.]*[0-9])?"
NUMBER = rf"(?:no|one|two|three|four|five|six|seven|eight|nine|ten|sixteen|few|many|several|some|{DIGITS})"
# Quantities. A plural that may be a verb ("adds a row") counts only after a number.
NOUN = (
    rf"(?:once|twice|{DIGITS}|numbers?|floats?|bytes?|kb|kib|mb|mib|gb|gib|blocks?|threads|warps|warpgroups|rows|"
    r"keys|queries|heads|products|logits|exponentials|barriers|instructions|clocks|cycles|flops?|kernels|tokens|"
    r"dimensions|columns|lanes|elements|registers|gradient|gradients|entries|fmas|ms|us|slots|"
    r"launchers?|loads)"
)
UNIT = (
    r"(?:(?:query|key|student|teacher|index|student's) )?(?:row|thread|multiprocessor|tile|block|lane|key|query|head|"
    r"warp|warpgroup|clock|step|call|stage|launch|token|second|element|vector|pair|worker|list|bucket|layer|column|"
    r"product|logit|chunk|scheduler|sequence|rank|sm|gpu|core|panel|kernel|batch|slot|entry|argument|dimension)"
)
FOLLOWS = (
    r"(?:for|to|in|when|where|that|which|and|or|on|at|each|with|as|by|beside|of|is|are|has|have|would|may|can|from|"
    r"over|if|so)"
)
THING = (
    r"(?!(?:of|in|on|at|for|to|from|with|is|as|by|than|per|into|over|and|or|what|that|when|if|share|own|use|read|"
    r"write|hold|see|take|make|get|need|have|give|fill)\b)\w+"
)
NO_CLAUSE = r"(?! (?:is|was|has|had|can|may|must|will|does|do|sees|holds|takes|gets|gives|keeps|needs|reads|of|that))"

RULES = [
    # Persistent kernels and their order of tiles
    name("stays", "persistent", "STAYS", "persistent", SOURCE),
    name("in_turns", "persistent, or alternate", "tiles_in_turns", "persistent_tiles"),
    name("(?:work|find)_in_turn", "next_tile", "work_in_turn", "next_tile"),
    name("in_turn", "next_tile, tile_scheduler", "tile_in_turn", "next_tile", "src/*"),
    name("look_ahead", "next_tile, prefetch", "look_ahead", "prefetch"),
    name("turns?", "ordered_sum (CPU), named barrier (CUDA)", "skl_turn_wait", "return_value", "src/*"),
    name("turns?", "sample", "turn_ms", "sample_ms", "bench/*.py"),
    # Asynchronous copies
    name("copy_box", "tma_load", "copy_box", "tma_load"),
    name("boxes_(?:commit|wait)", "tma_store_commit, tma_store_wait", "boxes_commit", "tma_store_commit"),
    name("add_box", "tma_reduce_add", "add_box", "tma_reduce_add"),
    # Operands
    name("lying", "smem_*", "lying_rows", "smem_rows", SOURCE),
    name("held", "reg_*, *_frag", "OWN_HELD", "shield", CUDA),
    name("hold_queries", "load_q_frag", "hold_queries", "load_q_frag"),
    # Pipelines
    name("ring_place", "pipeline_state: stage, phase", "ring_place", "pipeline_state"),
    name("(?<!_in_)place", "stage (of a pipeline), or tile", "tile_place", "in_place", "src/cuda/*"),
    name("hand_over", "producer_commit", "hand_over", "producer_commit", SOURCE),
    name("announced?", "producer_commit", "announce", "pronounced", SOURCE),
    name("^(?:leave|await)$", "consumer_release, consumer_wait", "leave", "leave_device", "src/cuda/*"),
    name("await_stage", "consumer_wait", "await_stage", "consumer_wait"),
    # Registers and fences
    name("(?:take|give)_registers", "reg_alloc, reg_dealloc", "take_registers", "reg_alloc"),
    name("settle", "fence_operand", "settle", "settled", CUDA),
    code(r"\bcommon *\(", "warp_uniform", "common(x)", "least_common(x)", CUDA),
    # What a backward knows of a row
    name("know_(?:own_rows|queries|stages)", "load_row_stats", "know_own_rows", "known_rows"),
    # Splits over keys
    name("parts|pieces", "splits: split_kv, num_splits", "parts_size", "partial_size", "src/cuda/*"),
    name("many_parts", "many_splits", "many_parts_bf16", "many_stages_bf16"),
    # Masked and full tiles
    name("edges?", "masked", "add_edge", "knowledge", "src/cuda/*"),
    name("whole", "full", "is_whole", "wholesale", "src/cuda/*"),
    name("whole_(?:stage|tile)s?|edge_tiles?", "full_stages, masked_tiles", "growing_whole_stages", "whole_struct"),
    # Heads that share the L2 cache
    name("sections?", "head_group", "SKL_SECTION_MAX", "intersection", "src/cuda/*"),
    # One pass
    name("sweeps?|swept", "fused_backward, pass", "launch_sweep", "launch_fused", "src/* include/* python/*"),
    # Shift of a softmax sum
    name("stabilisers?", "row_max, or shift", "stabiliser", "shift"),
    # Sparse
    name("(?:un)?selected|selection", "sparse, indices", "skl_is_selected", "select",
         "src/* include/* python/* oracle/*"),
    name("(?:un)?listed", "in_indices, sparse", "times_listed", "blistered", "src/* include/* python/* oracle/*"),
    name("lists", "sparse, indices", "launch_lists", "list_kernels", "src/* include/* python/* oracle/*"),
    name("(?:over|draw|make|empty|long|random|fill|bad)_lists(?!_of)", "sparse, indices", "over_lists",
         "help_lists_all", "tests/*"),
    # Teacher groups
    name("grouped(?!_query)", "teacher_group: has_teacher_groups", "skl_is_grouped", "grouped_query_attention"),
    code(r"\bskl_group *\(", "skl_group_size()", "skl_group(p)", "skl_group_size(p)"),
    # The two distributions, KL(A || B)
    name("[ml]_[12]", "m_a, l_a, m_b, l_b", "m_1", "m_a"),
    name("^(?:q|k|x|y|g|c|d|lse|scale|own|lying|queries|keys|heads?|logits|gradient)_[12]$", "_a, _b", "scale_1",
         "scale_a",
         "src/*"),
    code(r"(?:\.|->)(?:one|two)\b", ".a, .b", "params.one", "params.a", CUDA),
    # CPU passes
    name("stages?", "pass", "skl_stage_run", "skl_pass_run", "src/cpu/*"),
    # SMs
    name("(?<!per_)multiprocessors?", "sm_count", "multiprocessors", "cudaDevAttrMultiProcessorCount"),
    name("block_count", "sm_count, num_blocks", "block_count", "lock_count", "src/cuda/*"),
    name("general_resident", "blocks_per_sm", "GENERAL_RESIDENT", "resident_peak"),
    # Distillation
    name("lessons?", "attention_pair", "lesson_open", "lessen"),
    name("unguided", "control", "unguided_open", "guided"),
    name("pupils?|classroom", "student", "open_classroom", "student_open"),
    # Prose in names
    name("behind", "after", "keys_behind_the_last", "keys_after_the_last"),
    name("beside", "next_to, with", "beside_the_file", "besides"),
    name("made_up", "synthetic", "open_made_up", "made"),
    # Shared headers
    name("skl_shared", "SKL_HOST_DEVICE", "SKL_SHARED", "shared_size"),

    # Prose
    phrase("behind", "after", "keys behind it", "keys after it", LAB),
    phrase("beside", "compared with, next to, in addition to", "beside cuDNN", "besides cuDNN", LAB),
    phrase(rf"{NOUN} an? {UNIT}{NO_CLAUSE}", "... per ...", "five numbers\n * a row", "adds a row", LAB),
    phrase(rf"{NUMBER} {THING} an? {UNIT}{NO_CLAUSE}", "... per ...", "one block a multiprocessor",
           "in one call a row is", LAB),
    phrase(rf"an? (?:number|float|byte|block|thread|warp|row|key|line|add|barrier|constant|launch|kernel|ring) "
           rf"an? {UNIT}{NO_CLAUSE}", "... per ...", "a thread a row", "on a GPU a call", LAB),
    phrase(r"(?:a|the) multiprocessor|multiprocessors?", "SM", "132 multiprocessors", "132 SMs", LAB),
    phrase("(?:comes?|coming|came) along", "is included", "the KL comes along", "the KL is included"),
    phrase(r"br(?:ings?|ought|inging) (?:[\w`]+ ){0,3}along", "includes, has", "brings its runtime along",
           "brings its runtime"),
    phrase("as (?:it|they) (?:lies?|stands?|stood)", "in memory order, unchanged", "as they lie", "as they arrive"),
    phrase("(?:lie|lies|lying)", "is, are", "it lies in memory", "it relies on memory"),
    phrase("stands? (?:at|in(?! for)|on|once|there|outside)", "is", "the query stands at 3", "it stands for 3"),
    phrase("mend(?:s|ed|ing)?", "fix", "mend the code", "amend the code"),
    phrase("made(?:-| )up(?! of)", "synthetic", "made-up data", "made up of"),
    phrase("told apart|tells? (?:\\w+ )?apart", "distinguished", "are told apart", "are taken apart"),
    phrase("lets? go of", "frees, releases", "it lets go of it", "it lets go"),
    phrase(rf"of (?:its|their|our) own(?! (?!{FOLLOWS}\b)\w)", "its own ..., a separate ...", "a pass of its own",
           "a softmax of its own logits"),
    phrase("in turns|by turns", "alternately, one after another", "products in turns", "in turn", LAB),
    phrase("(?:blocks?|kernels?|ones?) (?:that|which) stays?", "persistent", "a block that stays",
           "a block that starts"),
    phrase("what products leave", "tensor cores and the other pipes compete", "what products leave", "what is left"),
    phrase("nothing waits for", "no host-device synchronisation", "nothing waits for the GPU", "nothing to wait for"),
    phrase("nobody|somebody|everybody|whoever|no one(?!-)", "no row, any thread, each caller",
           "keys that nobody sees",
           "keys that no row sees"),
    phrase("anew", "again", "computed anew", "a new"),
    phrase("at hand", "current, available", "the tile at hand", "that hand"),
    phrase("after one another", "one after another", "heads after one another", "one after another"),
    phrase("(?:at (?:most|least)|of|to) so (?:many|far|much|long)", "at most N, this many", "at most so many",
           "so many"),
    phrase("(?:rows?|lists?|tiles?|items?|blocks?) at work", "current", "the row at work", "at work"),
    phrase(r"as \w+ as may be", "as ... as possible", "as late as may be", "as late as it may be"),
    phrase("is right (?:even )?(?:after|then)", "may be called", "x_close() is right after a failure",
           "on the right after"),
    phrase("takes? (?:it|them) for", "treats it as", "takes it for none", "takes it"),
    phrase("less (?:the|that|those|its|their)", "minus", "the logit less the origin", "less than the origin"),
    phrase("may be off by", "error, tolerance", "what a result may be off by", "off by one"),
    phrase("in vain", "unnecessarily", "added in vain", "in van"),
    phrase("slow road", "slow path", "takes the slow road", "takes the slow path"),
    phrase("ratios? of medians", "ratio of median times", "ratios of medians", "ratio of median times"),
    phrase("takes? turns|in (?:its|their) turn", "alternate, one after another", "warps take turns", "it turns",
           GPU_PROSE),
    phrase("(?:an?|each|every|of|per|all|nine) turns?", "sample", "the median of nine turns", "it turns",
           "bench/* docs/benchmarks.md"),
    phrase("stabilisers?", "row maximum, or shift", "a lazy stabiliser", "a lazy shift"),
    phrase("sweeps?|swept|sweeping", "pass, fused backward", "in one sweep", "in one pass",
           "src/* include/* python/* README.md docs/design/* docs/guide/*"),
    phrase("an own", "its own", "an own stream", "its own stream"),
    phrase("shall", "must", "they shall agree", "they must agree"),
    phrase("save that", "except that", "equal, save that", "save the file"),
    phrase("an? fourth of", "a quarter of", "a fourth of it", "every fourth of May"),
    phrase("(?:has|have) not(?=[.,;:)])", "does not have, is missing", "one that it has not.", "it has not ended"),
    phrase(r"(?:one|an?) (?!little|lot|bit|few)\w+ more(?=[.,;:)])", "one more ...", "one launch more.",
           "a little more."),
    phrase("sees? (?:\\w+ )?whole", "full tile", "tiles it sees whole", "the whole", GPU_PROSE),
    phrase("(?:edge|whole) (?:tile|stage)s?", "masked tile, full tile", "an edge tile", "a masked tile",
           "src/cuda/* docs/design/*"),
    phrase("copy engine", "TMA", "by the copy engine", "by TMA", GPU_PROSE),
    phrase("sections? of heads|heads (?:come )?in sections", "head group", "sections of heads", "groups of heads",
           GPU_PROSE),
    phrase("(?:selected|listed) keys?|keys? (?:that is|that are)? ?(?:selected|listed)",
           "keys in `indices`, top-k keys",
           "over selected keys", "selects a kernel"),
    phrase("grouped teachers?|teacher is grouped", "teacher group", "with a grouped teacher",
           "grouped-query attention"),
    phrase("(?:row|query|lane|stage|block)(?:'s|s')? facts|facts of (?:a |the )?(?:row|quer|stage)\\w*", "row stats",
           "facts of queries", "in fact", GPU_PROSE),
    phrase("own kind", "that we do not support", "a mask of its own kind", "two of a kind"),
    phrase(r"what (?:is|was|are|were)(?: not)? \w+(?: (?!and|or|that)\w+)? "
           "(?:is|are|was|were|goes|go|takes|has|have|does|do|must|may|can|will|becomes|stays)",
           "name the subject first", "What is not wanted is not computed", "What is it?"),
    phrase("as (?:it is|they are)(?=[.,;:)])", "unchanged, as is", "passed as it is.", "as it is now"),
    phrase("lessons?|pupils?|classrooms?|unguided", "attention pair, student, control", "an unguided pupil",
           "guided"),
]
