//! Every verb against every state, by a table that is written from the specification.
//!
//! The table is text. One line is one rule: which cases it speaks of, what is told, what is written.
//! Every case must be spoken of by exactly one line, and every line must speak of some case, so that
//! neither a gap nor an overlap nor a dead rule can hide.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::*;

/// `when` names only what matters; what is not named can be anything.
///
/// * holder: the record's last holder is the caller (`own`), somebody else (`foreign`), or was
///   cleared when the outcome was settled from outside (`nobody`).
/// * lease: in flight only; it `runs`, or it is `over`, which is also so when the clock went back.
/// * request: `same`, `other`, or made by a recipe that is not known any more (`unknown`).
/// * policy: what may happen after an expired lease.
/// * effects: of the attempt that claims, `anywhere` or `marked` by checkpoints. `untouched` is in flight
///   by an attempt that marks its effects and has marked none.
/// * answer: the completed record holds the `same` answer as the one that is brought, or an `other`.
/// * attempt: the resolution names the record's attempt (`same`) or an `other`.
///
/// `run` is holder, attempt, fence, fingerprint and creation: `first` of a new key, the `next` one of
/// a known key, `kept`, as its `owner` knows it, or kept with the holder `cleared`.
const RULES: &str = "
# verb            | state         | when                                          | told          | state         | run     | checkpoint | kept for

# A new key, and a record that nobody can read.
claim             | absent        | effects:anywhere                              | acquired      | in flight     | first   | empty      | lease + unknown
claim             | absent        | effects:marked                                | acquired      | untouched     | first   | empty      | lease + unknown
claim             | unreadable    |                                               | unreadable    | -

# Mismatch is judged first, in every state but open.
claim             | in flight,untouched | request:other                                 | mismatch      | -
claim             | indeterminate | request:other                                 | mismatch      | -
claim             | completed     | request:other                                 | mismatch      | -
claim             | in flight,untouched | request:unknown                               | unreadable    | -
claim             | indeterminate | request:unknown                               | unreadable    | -
claim             | completed     | request:unknown                               | unreadable    | -

# In flight: one's own claim is recognised, whatever became of its lease.
claim             | in flight     | request:same holder:own                       | mine already  | in flight     | kept    | kept       | lease + unknown
claim             | untouched     | request:same holder:own                       | mine already  | untouched     | kept    | kept       | lease + unknown
claim             | in flight,untouched | request:same holder:foreign,nobody lease:runs | in flight     | -
claim             | in flight     | request:same holder:foreign,nobody lease:over policy:refuse    | unsettled  | indeterminate | kept | kept | as before
claim             | in flight     | request:same holder:foreign,nobody lease:over policy:reexecute | taken over | in flight     | next | kept | lease + unknown
# One that died before its first checkpoint has done nothing, whatever the policy.
claim             | untouched     | request:same holder:foreign,nobody lease:over effects:anywhere | acquired | in flight | next | kept | lease + unknown
claim             | untouched     | request:same holder:foreign,nobody lease:over effects:marked | acquired | untouched | next | kept | lease + unknown

# Open: free for anybody and any request, but not for the straggler of him who gave it up.
claim             | open          | holder:own                                    | wait for nothing | -
claim             | open          | holder:foreign,nobody effects:anywhere        | acquired      | in flight     | next    | kept       | lease + unknown
claim             | open          | holder:foreign,nobody effects:marked          | acquired      | untouched     | next    | kept       | lease + unknown

claim             | indeterminate | request:same policy:refuse                    | unsettled     | -
claim             | indeterminate | request:same policy:reexecute                 | taken over    | in flight     | next    | kept       | lease + unknown

claim             | completed     | request:same                                  | the answer    | -

# Renew: only while in flight, and then also after the lease, if nobody took over.
renew             | absent        |                                               | restored      | in flight     | owner   | empty      | lease + unknown
renew             | unreadable    |                                               | unreadable    | -
renew             | in flight     | holder:own                                    | renewed       | in flight     | kept    | kept       | lease + unknown
renew             | untouched     | holder:own                                    | renewed       | untouched     | kept    | kept       | lease + unknown
renew             | in flight,untouched | holder:foreign,nobody                         | lost          | -
renew             | open          |                                               | lost          | -
renew             | indeterminate |                                               | lost          | -
renew             | completed     |                                               | lost          | -

note              | absent        |                                               | restored      | in flight     | owner   | given      | lease + unknown
note              | unreadable    |                                               | unreadable    | -
note              | in flight     | holder:own                                    | renewed       | in flight     | kept    | given      | lease + unknown
note              | untouched     | holder:own                                    | renewed       | in flight     | kept    | given      | lease + unknown
note              | in flight,untouched | holder:foreign,nobody                         | lost          | -
note              | open          |                                               | lost          | -
note              | indeterminate |                                               | lost          | -
note              | completed     |                                               | lost          | -

# Complete: the last holder's answer is the truth, also after the outcome was called unknown.
complete          | absent        |                                               | restored      | completed     | owner   | empty      | retention
complete          | unreadable    |                                               | unreadable    | -
complete          | in flight,untouched | holder:own                                    | stored        | completed     | kept    | empty      | retention
complete          | in flight,untouched | holder:foreign,nobody                         | lost          | -
complete          | open          |                                               | lost          | -
complete          | indeterminate | holder:own                                    | healed        | completed     | kept    | empty      | retention
complete          | indeterminate | holder:foreign,nobody                         | lost          | -
complete          | completed     | holder:own answer:same                        | stored        | -
complete          | completed     | holder:own answer:other                       | lost          | -
complete          | completed     | holder:foreign,nobody request:same            | superseded    | -
complete          | completed     | holder:foreign,nobody request:other,unknown   | mismatch      | -

# Release: nothing happened ...
release no effect | absent        |                                               | not held      | -
release no effect | unreadable    |                                               | unreadable    | -
release no effect | in flight,untouched | holder:own                                    | released      | open          | kept    | empty      | retention
release no effect | indeterminate | holder:own                                    | released      | open          | kept    | empty      | retention
release no effect | open          | holder:own                                    | released      | -
release no effect | completed     | holder:own                                    | not held      | -
release no effect | in flight,untouched,open,indeterminate,completed | holder:foreign,nobody | not held     | -

# ... or it may have.
release unknown   | absent        |                                               | not held      | -
release unknown   | unreadable    |                                               | unreadable    | -
release unknown   | in flight,untouched | holder:own                                    | released      | indeterminate | kept    | kept       | as before
release unknown   | indeterminate | holder:own                                    | released      | -
release unknown   | open          | holder:own                                    | not held      | -
release unknown   | completed     | holder:own                                    | not held      | -
release unknown   | in flight,untouched,open,indeterminate,completed | holder:foreign,nobody | not held     | -

# Resolve: only what is unknown, and only if it is still what was judged.
resolve happened  | absent        |                                               | changed       | -
resolve happened  | unreadable    |                                               | unreadable    | -
resolve happened  | in flight,untouched | attempt:same holder:own lease:over            | resolved      | completed     | cleared | empty      | retention
resolve happened  | in flight,untouched | attempt:same holder:own lease:runs            | changed       | -
resolve happened  | indeterminate | attempt:same holder:own                       | resolved      | completed     | cleared | empty      | retention
resolve happened  | open          | attempt:same holder:own                       | changed       | -
resolve happened  | completed     | attempt:same holder:own                       | changed       | -
resolve happened  | in flight,untouched,open,indeterminate | attempt:same holder:foreign,nobody | changed   | -
resolve happened  | completed     | attempt:same holder:foreign                   | changed       | -
resolve happened  | completed     | attempt:same holder:nobody answer:same        | resolved      | -
resolve happened  | completed     | attempt:same holder:nobody answer:other       | changed       | -
resolve happened  | in flight,untouched,open,indeterminate,completed | attempt:other        | changed       | -

resolve nothing   | absent        |                                               | changed       | -
resolve nothing   | unreadable    |                                               | unreadable    | -
resolve nothing   | in flight,untouched | attempt:same holder:own lease:over            | resolved      | open          | cleared | empty      | retention
resolve nothing   | in flight,untouched | attempt:same holder:own lease:runs            | changed       | -
resolve nothing   | indeterminate | attempt:same holder:own                       | resolved      | open          | cleared | empty      | retention
resolve nothing   | open          | attempt:same holder:own                       | changed       | -
resolve nothing   | completed     | attempt:same holder:own                       | changed       | -
resolve nothing   | in flight,untouched,indeterminate,completed | attempt:same holder:foreign,nobody | changed | -
resolve nothing   | open          | attempt:same holder:foreign                   | changed       | -
resolve nothing   | open          | attempt:same holder:nobody                    | resolved      | -
resolve nothing   | in flight,untouched,open,indeterminate,completed | attempt:other        | changed       | -

# Forget: anything under which nobody runs, if it is still what was seen. `seen` is the record as it stands
# (`same`), one of another moment, state, holder or attempt (`other`), or that it cannot be read (`unreadable`).
forget            | absent        |                                               | absent        | -
forget            | unreadable    | seen:unreadable                               | forgotten     | gone
forget            | unreadable    | seen:same,other                               | unreadable    | -
forget            | in flight,untouched | lease:runs                              | still running | -
forget            | in flight,untouched | lease:over seen:same                    | forgotten     | gone
forget            | in flight,untouched | lease:over seen:other,unreadable        | changed       | -
forget            | open,indeterminate,completed | seen:same                      | forgotten     | gone
forget            | open,indeterminate,completed | seen:other,unreadable          | changed       | -
";

/// The record was written under other terms than the ones that come with the verb.
const RECORDS_LEASE: Duration = Duration::from_secs(20);
const TERMS: Terms = Terms {
    lease: Duration::from_secs(30),
    retention: Duration::from_secs(24 * 3600),
    unknown_retention: Duration::from_secs(7 * 24 * 3600),
};
const TERMS_MS: [u64; 3] = [30_000, 86_400_000, 604_800_000];

const CURRENT_RECIPE: u8 = 1;
const OLDER_RECIPE: u8 = 2;
const FORGOTTEN_RECIPE: u8 = 3;

const ANSWER: Bytes = Bytes::from_static(b"\x01the answer that is brought");
const OTHER_ANSWER: Bytes = Bytes::from_static(b"\x01another answer");

const MAX_FENCE: u64 = 281_474_976_710_655;

struct Rule {
    line: &'static str,
    verb: &'static str,
    states: Vec<&'static str>,
    when: Vec<(&'static str, Vec<&'static str>)>,
    told: &'static str,
    /// State, run, checkpoint, time; nothing is written if there is none.
    written: Option<[&'static str; 4]>,
    /// The record is gone.
    removed: bool,
}

fn rules() -> Vec<Rule> {
    let lines = RULES.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let when = cells[2].split_whitespace().map(|condition| {
                let (facet, values) = condition.split_once(':').expect(line);
                (facet, values.split(',').collect())
            });
            Rule {
                line,
                verb: cells[0],
                states: cells[1].split(',').collect(),
                when: when.collect(),
                told: cells[3],
                removed: cells[4..] == ["gone"],
                written: match &cells[4..] {
                    ["-"] | ["gone"] => None,
                    [state, run, checkpoint, time] => Some([state, run, checkpoint, time]),
                    _ => panic!("a rule writes nothing or four things: {line}"),
                },
            }
        })
        .collect()
}

/// What a case is called in the table.
#[derive(Clone, Debug)]
struct Case {
    state: &'static str,
    facets: BTreeMap<&'static str, &'static str>,
    current: Current,
}

impl Case {
    fn of(state: &'static str, current: Current) -> Self {
        Self { state, facets: BTreeMap::new(), current }
    }

    fn with(mut self, facet: &'static str, value: &'static str) -> Self {
        self.facets.insert(facet, value);
        self
    }

    fn record(&self) -> &Record {
        match &self.current {
            Current::Present(record) => record,
            Current::Absent | Current::Unreadable(_) => panic!("no record in {self:?}"),
        }
    }

    /// The one rule that speaks of this case.
    #[track_caller]
    fn rule<'a>(&self, verb: &str, rules: &'a [Rule], used: &mut BTreeSet<&'a str>) -> &'a Rule {
        let speaks = |rule: &&Rule| {
            rule.verb == verb
                && rule.states.contains(&self.state)
                && rule.when.iter().all(|(facet, values)| values.contains(&self.facets[facet]))
        };
        let mut found = rules.iter().filter(speaks);
        let rule = found.next().unwrap_or_else(|| panic!("{verb}: no rule for {self:?}"));
        if let Some(second) = found.next() {
            panic!("two rules for {self:?}:\n{}\n{}", rule.line, second.line);
        }
        used.insert(rule.line);
        rule
    }

    fn check<T: PartialEq + fmt::Debug>(&self, rule: &Rule, step: Step<T>, told: T, run: &Run) {
        assert_eq!(step.outcome, told, "told\n{}\n{self:?}", rule.line);
        let expected = rule.written.map(|written| run.written(self, written));
        assert_eq!(step.change == Change::Remove, rule.removed, "gone\n{}\n{self:?}", rule.line);
        let actual = match step.change {
            Change::Keep | Change::Remove => None,
            Change::Write { record, expires } => Some((*record, expires)),
        };
        assert_eq!(actual, expected, "written\n{}\n{self:?}", rule.line);
    }
}

/// What the caller brings.
struct Run {
    fingerprints: Fingerprints,
    answer: Bytes,
    note: Bytes,
}

impl Run {
    fn owner(&self) -> Owner {
        // Unlike every record here, so that what is taken from where is seen.
        Owner {
            holder: ME,
            fingerprints: self.fingerprints,
            attempt: Attempt::from_number(5),
            fence: Fence::from_number(NOW - 77),
            created: Millis(NOW - 78),
        }
    }

    /// `max(previous + 1, now)`, and no more than 48 bits.
    fn next_fence(previous: u64) -> u64 {
        let candidates = [previous + 1, NOW];
        candidates.into_iter().max().filter(|fence| *fence <= MAX_FENCE).unwrap_or(MAX_FENCE)
    }

    fn written(&self, case: &Case, [state, run, checkpoint, time]: [&str; 4]) -> (Record, Expires) {
        let [lease, retention, unknown_retention] = TERMS_MS;
        let mine = self.fingerprints.as_slice()[0];
        let (fingerprint, holder, attempt, fence, created) = match run {
            "first" => (mine, ME, 1, NOW, Millis(NOW)),
            "next" => {
                let old = case.record();
                let attempt = old.attempt.number().saturating_add(1);
                (mine, ME, attempt, Self::next_fence(old.fence.number()), old.created)
            }
            "owner" => (mine, ME, 5, NOW - 77, Millis(NOW - 78)),
            "kept" | "cleared" => {
                let old = case.record();
                let holder = if run == "kept" { old.holder } else { HolderId::NOBODY };
                (old.fingerprint, holder, old.attempt.number(), old.fence.number(), old.created)
            }
            other => panic!("run {other:?}"),
        };
        let checkpoint = match checkpoint {
            "kept" => case.record().checkpoint.clone(),
            "empty" => Bytes::new(),
            "given" => self.note.clone(),
            other => panic!("checkpoint {other:?}"),
        };
        let state = match state {
            "in flight" | "untouched" => State::InFlight {
                until: Millis(NOW + lease),
                lease: Duration::from_millis(lease),
                progress: match state {
                    "untouched" => Progress::Untouched,
                    _ => Progress::MayHaveActed,
                },
            },
            "open" => State::Open { since: Millis(NOW) },
            "indeterminate" => State::Indeterminate { since: Millis(NOW) },
            "completed" => State::Completed { at: Millis(NOW), response: self.answer.clone() },
            other => panic!("state {other:?}"),
        };
        let expires = match time {
            "lease + unknown" => Expires::At(Millis(NOW + lease + unknown_retention)),
            "retention" => Expires::At(Millis(NOW + retention)),
            "as before" => Expires::AsBefore,
            other => panic!("time {other:?}"),
        };
        let attempt = Attempt::from_number(attempt);
        let fence = Fence::from_number(fence);
        let record = Record { fingerprint, holder, attempt, fence, created, checkpoint, state };
        (record, expires)
    }
}

/// Every state x lease x holder x request x answer x numbers x checkpoint.
fn cases() -> Vec<Case> {
    let ms = |offset: i64| Millis(NOW.checked_add_signed(offset).unwrap());
    let running =
        |offset, progress| State::InFlight { until: ms(offset), lease: RECORDS_LEASE, progress };
    let in_flight = |offset| running(offset, Progress::MayHaveActed);
    let untouched = |offset| running(offset, Progress::Untouched);
    let completed = |offset, response| State::Completed { at: ms(offset), response };
    let states = [
        ("in flight", "runs", "-", in_flight(1)),
        ("in flight", "runs", "-", in_flight(20_000)),
        ("in flight", "runs", "-", in_flight(40_000)),
        ("in flight", "over", "-", in_flight(0)),
        ("in flight", "over", "-", in_flight(-1)),
        ("in flight", "over", "-", in_flight(-90_000_000)),
        // The clock went back: more than two of the record's leases are left.
        ("in flight", "over", "-", in_flight(40_001)),
        ("in flight", "over", "-", in_flight(90_000_000)),
        ("untouched", "runs", "-", untouched(1)),
        ("untouched", "runs", "-", untouched(40_000)),
        ("untouched", "over", "-", untouched(0)),
        ("untouched", "over", "-", untouched(-90_000_000)),
        ("untouched", "over", "-", untouched(40_001)),
        ("open", "-", "-", State::Open { since: ms(-5_000) }),
        ("open", "-", "-", State::Open { since: ms(5_000) }),
        ("indeterminate", "-", "-", State::Indeterminate { since: ms(-5_000) }),
        ("indeterminate", "-", "-", State::Indeterminate { since: ms(5_000) }),
        ("completed", "-", "same", completed(-5_000, ANSWER)),
        ("completed", "-", "same", completed(5_000, ANSWER)),
        ("completed", "-", "other", completed(-5_000, OTHER_ANSWER)),
        ("completed", "-", "other", completed(5_000, OTHER_ANSWER)),
    ];
    let holders = [("own", ME), ("foreign", SOMEBODY), ("nobody", HolderId::NOBODY)];
    let requests = [
        ("same", fingerprint(CURRENT_RECIPE, 10)),
        ("other", fingerprint(CURRENT_RECIPE, 99)),
        ("same", fingerprint(OLDER_RECIPE, 20)),
        ("other", fingerprint(OLDER_RECIPE, 10)), // equal bytes by another recipe mean nothing
        ("unknown", fingerprint(FORGOTTEN_RECIPE, 10)),
    ];
    let numbers =
        [(1, NOW - 10_000), (2, NOW - 1), (7, NOW), (8, NOW + 5_000), (u32::MAX, MAX_FENCE)];
    let checkpoints = [Bytes::new(), Bytes::from_static(b"noted before")];
    let mut cases = vec![
        Case::of("absent", Current::Absent),
        Case::of("unreadable", Current::Unreadable(Unreadable::Version)),
        Case::of("unreadable", Current::Unreadable(Unreadable::Damaged)),
    ];
    for (state, lease, answer, entered) in states {
        for (holder_name, holder) in holders {
            for (request, recorded) in requests {
                for (attempt, fence) in numbers {
                    for checkpoint in &checkpoints {
                        let record = Record {
                            fingerprint: recorded,
                            holder,
                            attempt: Attempt::from_number(attempt),
                            fence: Fence::from_number(fence),
                            created: Millis(NOW - 123_456),
                            checkpoint: checkpoint.clone(),
                            state: entered.clone(),
                        };
                        let case = Case::of(state, Current::Present(record))
                            .with("lease", lease)
                            .with("answer", answer)
                            .with("holder", holder_name)
                            .with("request", request);
                        cases.push(case);
                    }
                }
            }
        }
    }
    cases
}

fn told_by_claim(told: &str, case: &Case, run: &Run) -> ClaimOutcome<Grant> {
    let unsettled = || {
        let Record { holder, attempt, fence, checkpoint, .. } = case.record().clone();
        Unsettled { holder, attempt, fence, checkpoint }
    };
    let granted = |which: &str, takeover| {
        let (record, _) = run.written(case, ["in flight", which, "empty", "as before"]);
        let checkpoint = match &case.current {
            Current::Present(old) => old.checkpoint.clone(),
            Current::Absent | Current::Unreadable(_) => Bytes::new(),
        };
        let Record { attempt, fence, created, .. } = record;
        ClaimOutcome::Acquired(Grant { attempt, fence, created, takeover, checkpoint })
    };
    match told {
        "acquired" if case.state == "absent" => granted("first", false),
        "acquired" => granted("next", false),
        "taken over" => granted("next", true),
        "mine already" => granted("kept", case.record().attempt.number() > 1),
        "in flight" => match case.record().state {
            State::InFlight { until, .. } => {
                ClaimOutcome::InFlight { remaining: Duration::from_millis(until.0 - NOW) }
            }
            _ => panic!("not in flight: {case:?}"),
        },
        "wait for nothing" => ClaimOutcome::InFlight { remaining: Duration::ZERO },
        "the answer" => ClaimOutcome::Completed(recorded_answer(case)),
        "mismatch" => ClaimOutcome::Mismatch,
        "unsettled" => ClaimOutcome::Indeterminate(unsettled()),
        "unreadable" => ClaimOutcome::Unreadable,
        other => panic!("told {other:?}"),
    }
}

fn recorded_answer(case: &Case) -> Bytes {
    if case.facets["answer"] == "same" { ANSWER } else { OTHER_ANSWER }
}

fn told_by_renew(told: &str) -> RenewOutcome {
    match told {
        "renewed" => RenewOutcome::Renewed,
        "restored" => RenewOutcome::Restored,
        "lost" => RenewOutcome::Lost,
        "unreadable" => RenewOutcome::Unreadable,
        other => panic!("told {other:?}"),
    }
}

fn told_by_complete(told: &str, case: &Case) -> CompleteOutcome {
    match told {
        "stored" => CompleteOutcome::Stored,
        "healed" => CompleteOutcome::Healed,
        "restored" => CompleteOutcome::Restored,
        "superseded" => CompleteOutcome::Superseded(recorded_answer(case)),
        "mismatch" => CompleteOutcome::Mismatch,
        "lost" => CompleteOutcome::Lost,
        "unreadable" => CompleteOutcome::Unreadable,
        other => panic!("told {other:?}"),
    }
}

fn told_by_release(told: &str) -> ReleaseOutcome {
    match told {
        "released" => ReleaseOutcome::Released,
        "not held" => ReleaseOutcome::NotHeld,
        "unreadable" => ReleaseOutcome::Unreadable,
        other => panic!("told {other:?}"),
    }
}

fn told_by_resolve(told: &str) -> ResolveOutcome {
    match told {
        "resolved" => ResolveOutcome::Resolved,
        "changed" => ResolveOutcome::Changed,
        "unreadable" => ResolveOutcome::Unreadable,
        other => panic!("told {other:?}"),
    }
}

fn told_by_forget(told: &str, case: &Case) -> ForgetOutcome {
    match (told, &case.current) {
        ("forgotten", _) => ForgetOutcome::Forgotten,
        ("absent", _) => ForgetOutcome::Absent,
        ("changed", _) => ForgetOutcome::Changed,
        ("unreadable", _) => ForgetOutcome::Unreadable,
        (
            "still running",
            Current::Present(Record { state: State::InFlight { until, .. }, .. }),
        ) => ForgetOutcome::InFlight { remaining: Duration::from_millis(until.0 - NOW) },
        other => panic!("told {other:?}"),
    }
}

/// What may have been seen under a key, as it is called in the table.
fn sights(current: &Current) -> Vec<(&'static str, Seen)> {
    let record = match current {
        Current::Present(record) => record.sighting(),
        Current::Absent | Current::Unreadable(_) => Sighting {
            standing: Standing::Indeterminate,
            holder: ME,
            attempt: Attempt::FIRST,
            fence: Fence::from_number(NOW),
            created: Millis(NOW),
            at: Millis(NOW),
            lease: Duration::ZERO,
        },
    };
    let standing = match record.standing {
        Standing::Open => Standing::Indeterminate,
        _ => Standing::Open,
    };
    let others = [
        Sighting { standing, ..record },
        Sighting { holder: HolderId::from_bytes([0xC3; 16]), ..record },
        Sighting { attempt: Attempt::from_number(record.attempt.number() ^ 1), ..record },
        Sighting { at: Millis(record.at.0 + 1), ..record },
    ];
    let mut sights = vec![("same", Seen::Record(record)), ("unreadable", Seen::Unreadable)];
    sights.extend(others.map(|other| ("other", Seen::Record(other))));
    sights
}

#[test]
fn every_verb_does_to_every_state_what_the_specification_says() {
    let mut fingerprints = Fingerprints::one(fingerprint(CURRENT_RECIPE, 10));
    assert!(fingerprints.push(fingerprint(OLDER_RECIPE, 20)));
    let run = Run { fingerprints, answer: ANSWER, note: Bytes::from_static(b"noted now") };
    let owner = run.owner();
    let rules = rules();
    let mut used = BTreeSet::new();
    let mut count = BTreeMap::new();
    let mut counted = |verb: &'static str| *count.entry(verb).or_insert(0) += 1;

    let now = Millis(NOW);
    for case in cases() {
        for (policy, on_expired, where_to, effects) in [
            ("refuse", OnExpired::Refuse, "anywhere", Effects::Anywhere),
            ("refuse", OnExpired::Refuse, "marked", Effects::Marked),
            ("reexecute", OnExpired::Reexecute, "anywhere", Effects::Anywhere),
            ("reexecute", OnExpired::Reexecute, "marked", Effects::Marked),
        ] {
            counted("claim");
            let case = case.clone().with("policy", policy).with("effects", where_to);
            let rule = case.rule("claim", &rules, &mut used);
            let arguments = Claim { holder: ME, fingerprints, terms: TERMS, on_expired, effects };
            let step = claim(case.current.clone(), now, &arguments);
            case.check(rule, step, told_by_claim(rule.told, &case, &run), &run);
        }

        for note in [None, Some(run.note.clone()), Some(Bytes::new())] {
            counted("renew");
            let verb = if note.is_some() { "note" } else { "renew" };
            let rule = case.rule(verb, &rules, &mut used);
            let run = Run {
                note: note.clone().unwrap_or_default(),
                answer: ANSWER,
                fingerprints: run.fingerprints,
            };
            let renewal = Renewal { terms: TERMS, checkpoint: note };
            let step = renew(case.current.clone(), now, &owner, &renewal);
            case.check(rule, step, told_by_renew(rule.told), &run);
        }

        counted("complete");
        let rule = case.rule("complete", &rules, &mut used);
        let completion = Completion { terms: TERMS, response: ANSWER, writes: Writes::Keep };
        let step = complete(case.current.clone(), now, &owner, &completion);
        case.check(rule, step, told_by_complete(rule.told, &case), &run);

        for (verb, verdict) in
            [("release no effect", Verdict::NoEffect), ("release unknown", Verdict::Unknown)]
        {
            counted("release");
            let rule = case.rule(verb, &rules, &mut used);
            let step =
                release(case.current.clone(), now, &owner, &Release { terms: TERMS, verdict });
            case.check(rule, step, told_by_release(rule.told), &run);
        }

        for (verb, finding) in [
            ("resolve happened", Finding::Happened(ANSWER)),
            ("resolve nothing", Finding::NothingHappened),
        ] {
            let recorded = match &case.current {
                Current::Present(record) => record.attempt,
                Current::Absent | Current::Unreadable(_) => Attempt::FIRST,
            };
            for (which, attempt) in [("same", recorded), ("other", Attempt::from_number(3))] {
                counted("resolve");
                let case = case.clone().with("attempt", which);
                let rule = case.rule(verb, &rules, &mut used);
                let finding = finding.clone();
                let resolution = Resolution { holder: ME, attempt, finding, terms: TERMS };
                let step = resolve(case.current.clone(), now, &resolution);
                case.check(rule, step, told_by_resolve(rule.told), &run);
            }
        }

        for (which, seen) in sights(&case.current) {
            counted("forget");
            let case = case.clone().with("seen", which);
            let rule = case.rule("forget", &rules, &mut used);
            let step = forget(&case.current, now, &Forget { seen });
            case.check(rule, step, told_by_forget(rule.told, &case), &run);
        }
    }

    for rule in &rules {
        assert!(used.contains(rule.line), "a rule that speaks of no case: {}", rule.line);
    }
    // 3 without a record; 21 states x 3 holders x 5 requests x 5 pairs of numbers x 2 checkpoints.
    let situations = 3 + 21 * 3 * 5 * 5 * 2;
    let expected = [
        ("claim", 4),
        ("complete", 1),
        ("forget", 6),
        ("release", 2),
        ("renew", 3),
        ("resolve", 4),
    ]
    .map(|(verb, times)| (verb, times * situations));
    assert_eq!(count, BTreeMap::from(expected));
    assert_eq!(count.values().sum::<i32>(), 63_060, "cases were added or taken away");
    assert_eq!(rules.len(), 94, "rules were added or taken away");
}
