//! What holds in every sequence of verbs, whoever sends them and however often.

use super::*;

const HOLDERS: usize = 4;
const TERMS: Terms = Terms {
    lease: Duration::from_secs(30),
    retention: Duration::from_secs(300),
    unknown_retention: Duration::from_secs(600),
};

#[derive(Clone, Copy, Debug)]
enum Verb {
    Claim,
    Renew,
    Checkpoint(u8),
    Complete(u8),
    Release(Verdict),
    Happened(u8),
    NothingHappened,
}

/// One verb by one of the holders, a while after the one before.
#[derive(Clone, Copy, Debug)]
struct Op {
    wait: u64,
    holder: usize,
    request: u8,
    policy: OnExpired,
    effects: Effects,
    verb: Verb,
    /// A resolution names what the record says, or makes something up.
    judged: bool,
}

fn any_verb() -> impl Strategy<Value = Verb> {
    prop_oneof![
        6 => Just(Verb::Claim),
        2 => Just(Verb::Renew),
        1 => (0..3_u8).prop_map(Verb::Checkpoint),
        3 => (0..3_u8).prop_map(Verb::Complete),
        2 => Just(Verb::Release(Verdict::NoEffect)),
        2 => Just(Verb::Release(Verdict::Unknown)),
        1 => (0..3_u8).prop_map(Verb::Happened),
        1 => Just(Verb::NothingHappened),
    ]
}

fn any_op(policy: impl Strategy<Value = OnExpired>) -> impl Strategy<Value = Op> {
    // Around the borders: nothing, within a lease, its end, past it, past each retention.
    let wait = prop_oneof![
        4 => Just(0),
        8 => 1..15_000_u64,
        3 => prop::sample::select(vec![29_999, 30_000, 30_001]),
        1 => prop::sample::select(vec![300_000, 700_000]),
    ];
    let request = prop_oneof![6 => Just(0_u8), 1 => Just(1)];
    let judged = prop::bool::weighted(0.8);
    (wait, 0..HOLDERS, request, policy, any_effects(), any_verb(), judged).prop_map(
        |(wait, holder, request, policy, effects, verb, judged)| Op {
            wait,
            holder,
            request,
            policy,
            effects,
            verb,
            judged,
        },
    )
}

fn any_policy() -> impl Strategy<Value = OnExpired> {
    prop_oneof![Just(OnExpired::Refuse), Just(OnExpired::Reexecute)]
}

fn any_effects() -> impl Strategy<Value = Effects> {
    prop_oneof![Just(Effects::Anywhere), Just(Effects::Marked)]
}

fn holder(index: usize) -> HolderId {
    HolderId::from_bytes([u8::try_from(index).unwrap() + 1; 16])
}

fn answer(number: u8) -> Bytes {
    Bytes::from(vec![1, number])
}

/// A store of one key, and what its callers may believe by what they were told.
#[derive(Default)]
struct World {
    now: u64,
    stored: Option<(Record, Millis)>,
    /// What each caller was granted last; kept when it is long lost, as a paused handler would.
    owners: [Option<Owner>; HOLDERS],
    /// Until when each caller may believe to be alone.
    alone_until: [u64; HOLDERS],
    /// Since the record was new.
    highest: Option<(Attempt, Fence)>,
    answered: Option<Bytes>,
    /// The attempt of which its holder, or whoever settled it, said that nothing happened.
    nothing_happened: Option<Attempt>,
    /// The attempt that marks its effects, follows none that may have acted, and has marked none.
    untouched: Option<Attempt>,
}

impl World {
    fn current(&self) -> Current {
        match &self.stored {
            Some((record, _)) => Current::Present(record.clone()),
            None => Current::Absent,
        }
    }

    fn pass(&mut self, wait: u64) {
        self.now += wait;
        if self.stored.as_ref().is_some_and(|(_, expires)| expires.0 <= self.now) {
            self.stored = None;
            self.highest = None;
            self.answered = None;
            self.nothing_happened = None;
            self.untouched = None;
        }
    }

    fn apply<T>(&mut self, step: Step<T>) -> T {
        if let Change::Write { record, expires } = step.change {
            let expires = match expires {
                Expires::At(at) => at,
                Expires::AsBefore => self.stored.as_ref().expect("there is a before").1,
            };
            assert!(expires.0 > self.now, "written for no time at all");
            self.stored = Some((*record, expires));
        }
        step.outcome
    }

    fn run(&mut self, op: Op) {
        self.pass(op.wait);
        let (now, current) = (Millis(self.now), self.current());
        let me = holder(op.holder);
        let before = self.stored.clone();
        match op.verb {
            Verb::Claim => {
                let fingerprints = Fingerprints::one(fingerprint(1, op.request));
                let claim_of_op = Claim {
                    holder: me,
                    fingerprints,
                    terms: TERMS,
                    on_expired: op.policy,
                    effects: op.effects,
                };
                let outcome = self.apply(claim(current, now, &claim_of_op));
                self.told_of_claim(op, &claim_of_op, outcome, before.map(|(record, _)| record));
            }
            Verb::Renew | Verb::Checkpoint(_) => {
                let Some(owner) = self.owners[op.holder] else { return };
                let checkpoint = match op.verb {
                    Verb::Checkpoint(number) => Some(Bytes::from(vec![number])),
                    _ => None,
                };
                let outcome =
                    self.apply(renew(current, now, &owner, &Renewal { terms: TERMS, checkpoint }));
                if matches!(op.verb, Verb::Checkpoint(_)) && outcome == RenewOutcome::Renewed {
                    self.untouched = None;
                }
                self.alone_until[op.holder] = match outcome {
                    RenewOutcome::Renewed | RenewOutcome::Restored => now.after(TERMS.lease).0,
                    RenewOutcome::Lost | RenewOutcome::Unreadable => 0,
                };
            }
            Verb::Complete(number) => {
                let Some(owner) = self.owners[op.holder] else { return };
                let completion =
                    Completion { terms: TERMS, response: answer(number), writes: Writes::Keep };
                self.alone_until[op.holder] = 0;
                let outcome = self.apply(complete(current, now, &owner, &completion));
                if let CompleteOutcome::Superseded(told) = outcome {
                    let (record, _) = before.expect("somebody was first");
                    assert_eq!(record.fingerprint, owner.fingerprints.current());
                    assert_eq!(Some(told), self.answered, "superseded by something else");
                }
            }
            Verb::Release(verdict) => {
                let Some(owner) = self.owners[op.holder] else { return };
                self.alone_until[op.holder] = 0;
                let outcome =
                    self.apply(release(current, now, &owner, &Release { terms: TERMS, verdict }));
                if outcome == ReleaseOutcome::Released && verdict == Verdict::Unknown {
                    self.untouched = None;
                }
                if outcome == ReleaseOutcome::Released && verdict == Verdict::NoEffect {
                    self.nothing_happened = self.stored.as_ref().map(|(record, _)| record.attempt);
                }
            }
            Verb::Happened(_) | Verb::NothingHappened => {
                let recorded = before.as_ref().map(|(record, _)| (record.holder, record.attempt));
                let (judged_holder, attempt) =
                    recorded.filter(|_| op.judged).unwrap_or((me, Attempt::from_number(2)));
                let finding = match op.verb {
                    Verb::Happened(number) => Finding::Happened(answer(number)),
                    _ => Finding::NothingHappened,
                };
                let nothing = finding == Finding::NothingHappened;
                let resolution =
                    Resolution { holder: judged_holder, attempt, finding, terms: TERMS };
                let outcome = self.apply(resolve(current, now, &resolution));
                if outcome == ResolveOutcome::Resolved {
                    for (index, until) in self.alone_until.iter().enumerate() {
                        assert!(
                            *until <= self.now || holder(index) != judged_holder,
                            "settled under a holder whose lease was running"
                        );
                    }
                    if nothing {
                        self.nothing_happened = Some(attempt);
                    }
                }
            }
        }
        self.look();
    }

    fn told_of_claim(
        &mut self,
        op: Op,
        claim: &Claim,
        outcome: ClaimOutcome<Grant>,
        before: Option<Record>,
    ) {
        match outcome {
            ClaimOutcome::Acquired(grant) => {
                for (index, until) in self.alone_until.iter().enumerate() {
                    assert!(index == op.holder || *until <= self.now, "two running leases");
                }
                let started_again = before.as_ref().is_some_and(|old| old.attempt != grant.attempt);
                let is_new = before.is_none() || started_again;
                if let Some(old) = before.filter(|_| started_again) {
                    assert_eq!(grant.attempt, old.attempt.next());
                    assert!(grant.fence > old.fence, "the fence did not grow");
                    let said = self.nothing_happened == Some(old.attempt)
                        || self.untouched == Some(old.attempt);
                    assert!(
                        said || op.policy == OnExpired::Reexecute,
                        "run again although the attempt before may have had its effect"
                    );
                    assert_eq!(grant.takeover, !said, "the handler is told wrongly about it");
                }
                if is_new {
                    let marks = op.effects == Effects::Marked && !grant.takeover;
                    self.untouched = marks.then_some(grant.attempt);
                }
                let Claim { holder, fingerprints, .. } = *claim;
                let Grant { attempt, fence, created, .. } = grant;
                self.owners[op.holder] =
                    Some(Owner { holder, fingerprints, attempt, fence, created });
                self.alone_until[op.holder] = self.now + 30_000;
            }
            ClaimOutcome::Completed(told) => {
                let recorded = before.map(|record| record.fingerprint);
                assert_eq!(recorded, Some(claim.fingerprints.current()), "of another request");
                assert_eq!(Some(told), self.answered, "another answer");
            }
            ClaimOutcome::InFlight { remaining } => assert!(remaining <= TERMS.lease),
            ClaimOutcome::Mismatch => {
                let old = before.expect("a mismatch with something");
                assert_ne!(old.fingerprint, claim.fingerprints.current());
                assert!(!matches!(old.state, State::Open { .. }), "an open key takes any request");
            }
            ClaimOutcome::Indeterminate(unsettled) => {
                let (record, _) = self.stored.as_ref().expect("an attempt to be settled");
                assert_eq!(unsettled, Unsettled::of(record));
            }
            ClaimOutcome::Unreadable => panic!("nothing here is unreadable"),
        }
    }

    /// What must hold of the record after every verb.
    fn look(&mut self) {
        let Some((record, _)) = &self.stored else { return };
        let (attempt, fence) = self.highest.unwrap_or((record.attempt, record.fence));
        assert!(record.attempt >= attempt, "the attempt went down");
        assert!(record.fence >= fence, "the fence went down");
        self.highest = Some((record.attempt, record.fence));
        match (&self.answered, &record.state) {
            (Some(answered), State::Completed { response, .. }) => assert_eq!(answered, response),
            (Some(_), state) => panic!("an answer became {state:?}"),
            (None, State::Completed { response, .. }) => self.answered = Some(response.clone()),
            (None, _) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_promises_hold_in_every_sequence(
        ops in prop::collection::vec(any_op(any_policy()), 1..60),
    ) {
        let mut world = World { now: NOW, ..World::default() };
        for op in ops {
            world.run(op);
        }
    }

    /// As above, but here the assertion on running again has no way out.
    #[test]
    fn under_refuse_nothing_runs_again_that_may_have_had_its_effect(
        ops in prop::collection::vec(any_op(Just(OnExpired::Refuse)), 1..60),
    ) {
        let mut world = World { now: NOW, ..World::default() };
        for op in ops {
            world.run(op);
        }
    }
}

fn any_terms() -> impl Strategy<Value = Terms> {
    (1..100_000_u64, 1..1_000_000_u64, 1..1_000_000_u64).prop_map(|(lease, kept, unknown)| Terms {
        lease: Duration::from_millis(lease),
        retention: Duration::from_millis(kept),
        unknown_retention: Duration::from_millis(unknown),
    })
}

fn any_owner() -> impl Strategy<Value = Owner> {
    (prop_oneof![Just(ME), Just(SOMEBODY)], 0..3_u8, 1..5_u32, 0..1_u64 << 48).prop_map(
        |(holder, digest, attempt, fence)| Owner {
            holder,
            fingerprints: Fingerprints::one(fingerprint(1, digest)),
            attempt: Attempt::from_number(attempt),
            fence: Fence::from_number(fence),
            created: Millis(NOW),
        },
    )
}

/// What a store does that was asked twice because the first reply was lost. A second sending may
/// write again (the store's expiry then starts anew), but it may not write anything else.
#[track_caller]
fn twice<T: PartialEq + std::fmt::Debug>(
    current: &Current,
    verb: impl Fn(Current) -> Step<T>,
    expected: impl FnOnce(T) -> T,
) {
    let first = verb(current.clone());
    let between = after(current, &first);
    let second = verb(between.clone());
    assert_eq!(after(&between, &second), between, "the second sending changed the record");
    assert_eq!(second.outcome, expected(first.outcome), "the second sending was told otherwise");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// The same grant, with one exception: a takeover may be told where the first reply told none.
    #[test]
    fn a_claim_that_is_sent_again_is_told_the_same(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        on_expired in any_policy(), effects in any_effects(), now in 0..1_u64 << 48,
    ) {
        let Owner { holder, fingerprints, .. } = owner;
        let arguments = Claim { holder, fingerprints, terms, on_expired, effects };
        twice(&current, |current| claim(current, Millis(now), &arguments), |first| {
            first.map(|grant| {
                let takeover = grant.takeover || grant.attempt > Attempt::FIRST;
                Grant { takeover, ..grant }
            })
        });
    }

    /// Later, but before its lease ends: the same grant, and the lease counts from then.
    #[test]
    fn a_claim_that_is_sent_again_later_extends_its_lease(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        on_expired in any_policy(), effects in any_effects(), now in 0..1_u64 << 47, share in 0.0..1.0_f64,
    ) {
        let Owner { holder, fingerprints, .. } = owner;
        let arguments = Claim { holder, fingerprints, terms, on_expired, effects };
        let first = claim(current.clone(), Millis(now), &arguments);
        if let ClaimOutcome::Acquired(given) = &first.outcome {
            let later = Millis(now).after(terms.lease.mul_f64(share));
            let second = claim(after(&current, &first), later, &arguments);
            let ClaimOutcome::Acquired(again) = second.outcome else { panic!("{second:?}") };
            prop_assert_eq!((again.attempt, again.fence), (given.attempt, given.fence));
            prop_assert_eq!((again.created, &again.checkpoint), (given.created, &given.checkpoint));
            let Change::Write { record, expires } = second.change else { panic!("not extended") };
            let until = later.after(terms.lease);
            let State::InFlight { progress, .. } = record.state else { panic!("not in flight") };
            prop_assert_eq!(
                &record.state,
                &State::InFlight { until, lease: terms.lease, progress }
            );
            prop_assert_eq!(expires, Expires::At(until.after(terms.unknown_retention)));
        }
    }

    /// The first sending of a record that was lost restores it, so the second finds it there.
    #[test]
    fn a_renewal_that_is_sent_again_is_told_the_same(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        checkpoint in prop::option::of(prop::collection::vec(any::<u8>(), 0..9)),
        now in 0..1_u64 << 48,
    ) {
        let renewal = Renewal { terms, checkpoint: checkpoint.map(Bytes::from) };
        twice(&current, |current| renew(current, Millis(now), &owner, &renewal), |first| {
            match first {
                RenewOutcome::Restored => RenewOutcome::Renewed,
                told => told,
            }
        });
    }

    /// Whatever stored the answer first, the second sending finds it stored.
    #[test]
    fn a_completion_that_is_sent_again_is_told_that_it_is_stored(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        number in 0..3_u8, now in 0..1_u64 << 48,
    ) {
        let completion = Completion { terms, response: answer(number), writes: Writes::Keep };
        twice(&current, |current| complete(current, Millis(now), &owner, &completion), |first| {
            match first {
                CompleteOutcome::Healed | CompleteOutcome::Restored => CompleteOutcome::Stored,
                told => told,
            }
        });
    }

    #[test]
    fn a_release_that_is_sent_again_is_told_the_same(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        verdict in prop_oneof![Just(Verdict::NoEffect), Just(Verdict::Unknown)],
        now in 0..1_u64 << 48,
    ) {
        let arguments = Release { terms, verdict };
        let told = |first| first;
        twice(&current, |current| release(current, Millis(now), &owner, &arguments), told);
    }

    #[test]
    fn a_resolution_that_is_sent_again_is_told_the_same(
        current in any_current(), owner in any_owner(), terms in any_terms(),
        happened in prop::option::of(0..3_u8), now in 0..1_u64 << 48,
    ) {
        let finding = happened.map_or(Finding::NothingHappened, |it| Finding::Happened(answer(it)));
        let Owner { holder, attempt, .. } = owner;
        let resolution = Resolution { holder, attempt, finding, terms };
        let told = |first| first;
        twice(&current, |current| resolve(current, Millis(now), &resolution), told);
    }

    #[test]
    fn no_verb_panics_whatever_the_record_the_time_and_the_terms(
        current in any_current(), owner in any_owner(), now: u64,
        (lease, retention, unknown_retention) in any::<(Duration, Duration, Duration)>(),
        on_expired in any_policy(), effects in any_effects(),
    ) {
        let (now, terms) = (Millis(now), Terms { lease, retention, unknown_retention });
        let Owner { holder, fingerprints, .. } = owner;
        let arguments = Claim { holder, fingerprints, terms, on_expired, effects };
        let step = claim(current.clone(), now, &arguments);
        let again = after(&current, &step);
        let _ = claim(again.clone(), Millis(0), &Claim { holder: SOMEBODY, ..arguments });
        let _ = renew(again.clone(), now, &owner, &Renewal { terms, checkpoint: None });
        let finding = Finding::NothingHappened;
        let attempt = owner.attempt;
        let _ = resolve(again, now, &Resolution { holder, attempt, finding, terms });
    }
}

/// A straggler must not hold up those who come after the key was given up.
#[test]
fn a_claim_that_arrives_after_its_sender_gave_up_takes_nothing() {
    let fingerprints = Fingerprints::one(fingerprint(1, 0));
    let (on_expired, effects) = (OnExpired::Refuse, Effects::Anywhere);
    let mine = Claim { holder: ME, fingerprints, terms: TERMS, on_expired, effects };
    let step = claim(Current::Absent, Millis(NOW), &mine);
    let ClaimOutcome::Acquired(grant) = step.outcome.clone() else { panic!("{step:?}") };
    let Grant { attempt, fence, created, .. } = grant;
    let owner = Owner { holder: ME, fingerprints, attempt, fence, created };
    let claimed = after(&Current::Absent, &step);
    let given_up = release(
        claimed.clone(),
        Millis(NOW),
        &owner,
        &Release { terms: TERMS, verdict: Verdict::NoEffect },
    );
    let open = after(&claimed, &given_up);

    let straggler = claim(open.clone(), Millis(NOW + 5), &mine);
    assert_eq!(straggler.change, Change::Keep);
    assert_eq!(straggler.outcome, ClaimOutcome::InFlight { remaining: Duration::ZERO });

    let next = claim(open, Millis(NOW + 5), &Claim { holder: SOMEBODY, ..mine });
    assert!(matches!(next.outcome, ClaimOutcome::Acquired(_)), "{next:?}");
}
