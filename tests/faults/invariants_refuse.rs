//! A checker that accepts everything shows nothing: each invariant refuses a history that breaks it, by its
//! name, and the same history without that one fault is accepted.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;

use crate::invariants::Promise::{AtMostOnce, Deduplicated, Transactional};
use crate::invariants::{
    Charge, End, Evidence, Finish, Held, Operation, Promise, Request, Run, State, key_id,
};

fn request(amount: u64) -> Request {
    (amount, "tok".to_owned())
}

fn body(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn paid(amount: u64, text: &'static str) -> End {
    End::Paid { request: request(amount), body: body(text), replay: false }
}

fn replayed(text: &'static str) -> End {
    End::Paid { request: request(1), body: body(text), replay: true }
}

fn sent(amount: u64, end: End) -> Operation {
    Operation { key: "k".to_owned(), request: request(amount), end }
}

fn charge(attempt: u32, amount: u64) -> Charge {
    Charge { key_id: key_id("k"), attempt, amount }
}

/// A handler that ran from one millisecond to another; its claim was granted as it began.
fn ran(attempt: u32, from: u64, to: Option<u64>) -> Run {
    let ended = to.map(|to| (to * 1000, Finish::Answers));
    let request = request(1);
    Run { key_id: key_id("k"), attempt, fence: from, request, began: from * 1000, ended }
}

fn held(attempt: u32, fence: u64, state: State) -> Held {
    Held { attempt, fence, state }
}

fn completed(text: &'static str) -> State {
    State::Completed { status: 201, body: Some(body(text)) }
}

/// A payment of 1 that went well: granted at 1,000, charged, stored at 1,050, told, and replayed.
fn good() -> Evidence {
    Evidence {
        operations: vec![
            sent(1, End::Lost),
            sent(1, End::InUse),
            sent(1, paid(1, "a")),
            sent(1, replayed("a")),
        ],
        runs: vec![ran(1, 1_000, Some(1_050))],
        charges: vec![charge(1, 1)],
        sights: vec![
            ("k".to_owned(), held(0, 0, State::Absent)),
            ("k".to_owned(), held(1, 1_000, State::InFlight { until: 1_500 })),
            ("k".to_owned(), held(1, 1_000, completed("a"))),
        ],
        held: [("k".to_owned(), held(1, 1_000, completed("a")))].into(),
        lease: Duration::from_millis(500),
    }
}

/// The same after a change.
fn but(change: impl FnOnce(&mut Evidence)) -> Evidence {
    let mut evidence = good();
    change(&mut evidence);
    evidence
}

/// One whose process died behind its charge: nobody knows.
fn interrupted() -> Evidence {
    Evidence {
        operations: vec![sent(1, End::Lost), sent(1, End::Unknown)],
        runs: vec![ran(1, 1_000, None)],
        charges: vec![charge(1, 1)],
        sights: good().sights[..2].to_vec(),
        held: [("k".to_owned(), held(1, 1_000, State::Indeterminate))].into(),
        ..good()
    }
}

#[track_caller]
fn breaks(evidence: &Evidence, promise: Promise, expected: &[&str]) {
    let broken = evidence.broken(promise);
    let names: BTreeSet<_> = broken.iter().map(|broken| broken.invariant).collect();
    assert_eq!(names, expected.iter().copied().collect(), "{promise:?}: {broken:#?}");
}

#[test]
fn a_history_in_which_all_went_well_breaks_nothing() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        breaks(&good(), promise, &[]);
    }
}

#[test]
fn a_lost_answer_allows_both_outcomes() {
    breaks(&interrupted(), AtMostOnce, &[]);
    let mut nothing = interrupted();
    nothing.charges.clear();
    breaks(&nothing, AtMostOnce, &[]);
    let told = but(|it| it.operations = vec![sent(1, End::Lost), sent(1, replayed("a"))]);
    breaks(&told, AtMostOnce, &[]);
}

#[test]
fn i1_refuses_a_second_effect_and_one_that_nobody_asked_for() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        breaks(&but(|it| it.charges.push(charge(1, 1))), promise, &["I1"]);
        let stray = Charge { key_id: key_id("other"), ..charge(1, 1) };
        breaks(&but(|it| it.charges.push(stray)), promise, &["I1"]);
    }
}

#[test]
fn i2_refuses_a_success_that_is_not_what_is_stored() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        breaks(&but(|it| it.operations[2].end = paid(1, "b")), promise, &["I2"]);
    }
    // An error of the handler is an answer as well.
    let failed = |text| End::Answered { status: 500, body: body(text), replay: false };
    breaks(&but(|it| it.operations.push(sent(1, failed("b")))), AtMostOnce, &["I2"]);
    // And two that were never stored are two.
    let unstored = |second| {
        let mut evidence = interrupted();
        evidence.operations = vec![sent(1, paid(1, "a")), sent(1, paid(1, second))];
        evidence
    };
    breaks(&unstored("a"), AtMostOnce, &[]);
    breaks(&unstored("b"), AtMostOnce, &["I2"]);
}

#[test]
fn i3_refuses_an_answer_that_changes_and_one_that_is_gone() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        let changed = but(|it| it.sights.push(("k".to_owned(), held(1, 1_000, completed("b")))));
        breaks(&changed, promise, &["I3"]);
    }
    let gone = but(|it| it.held = [("k".to_owned(), held(0, 0, State::Absent))].into());
    breaks(&gone, AtMostOnce, &["I3", "I8"]);
    // What was replayed is what was stored, also if nobody looked into the store then.
    let twice = but(|it| {
        it.operations = vec![sent(1, replayed("a")), sent(1, replayed("b"))];
    });
    breaks(&twice, AtMostOnce, &["I2", "I3"]);
}

#[test]
fn i4_refuses_a_second_owner_before_the_lease_of_the_first_is_over() {
    let second = |at, first_ended: Option<u64>| {
        but(|it| {
            it.runs = vec![ran(1, 1_000, first_ended), ran(2, at, Some(at + 50))];
            it.held = [("k".to_owned(), held(2, at, completed("a")))].into();
            it.sights.truncate(2);
        })
    };
    // Its process is dead, and its lease goes on until 1,500.
    breaks(&second(1_499, None), Deduplicated, &["I4"]);
    breaks(&second(1_500, None), Deduplicated, &[]);
    // Renewed: the store was seen with a later end.
    let renewed = |at| {
        let mut evidence = second(at, Some(9_000));
        evidence.sights.push(("k".to_owned(), held(1, 1_000, State::InFlight { until: 1_900 })));
        evidence
    };
    breaks(&renewed(1_899), Deduplicated, &["I4"]);
    breaks(&renewed(1_900), Deduplicated, &[]);
    // At its own end it may give the key up.
    breaks(&second(1_200, Some(1_200)), Deduplicated, &[]);
    breaks(&second(1_200, Some(1_203)), Deduplicated, &["I4"]);
    // A claim whose handler never started was given up by who made it.
    let given_up = but(|it| {
        it.runs = vec![ran(2, 1_100, Some(1_150))];
        it.charges = vec![charge(2, 1)];
        it.sights.truncate(2);
        it.held = [("k".to_owned(), held(2, 1_100, completed("a")))].into();
    });
    breaks(&given_up, Deduplicated, &[]);
}

#[test]
fn i5_refuses_two_handlers_at_once() {
    // The leases are no help: the first was paused for longer than its own.
    let second = |at, first_ended: Option<u64>| {
        but(|it| {
            it.runs = vec![ran(1, 1_000, first_ended), ran(2, at, Some(at + 50))];
            it.held = [("k".to_owned(), held(2, at, completed("a")))].into();
            it.sights.truncate(2);
        })
    };
    breaks(&second(2_000, Some(1_900)), AtMostOnce, &[]);
    breaks(&second(2_000, Some(2_100)), AtMostOnce, &["I5"]);
    // Nobody has seen it end: nobody may follow.
    breaks(&second(2_000, None), AtMostOnce, &["I5"]);
    // Where an unknown outcome is run again, a paused handler may be met.
    breaks(&second(2_000, Some(2_100)), Deduplicated, &[]);
}

#[test]
fn i6_refuses_another_request_that_runs() {
    let charged = but(|it| {
        it.charges = vec![charge(1, 2)];
        it.runs[0].request = request(2);
    });
    breaks(&but(|it| it.charges[0].amount = 2), AtMostOnce, &["I6"]);
    // What was told is a payment of 1.
    breaks(&charged, AtMostOnce, &["I6"]);
    // Two handlers, and only the second charged: the first may have.
    let two = |finish| {
        but(|it| {
            let first = Run { request: request(2), ..ran(1, 900, None) };
            it.runs.insert(0, Run { ended: Some((950_000, finish)), ..first });
            it.runs[1].attempt = 2;
            it.charges = vec![charge(2, 1)];
        })
    };
    for promise in [AtMostOnce, Deduplicated] {
        breaks(&two(Finish::CutOff), promise, &["I6"]);
        // Freed for a corrected request.
        breaks(&two(Finish::DidNothing), promise, &[]);
    }
    // A transaction that was not committed has left nothing.
    breaks(&two(Finish::CutOff), Transactional, &[]);
}

#[test]
fn i7_refuses_a_success_without_its_effect() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        // The record says the same: I8.
        breaks(&but(|it| it.charges.clear()), promise, &["I7", "I8"]);
    }
    let mut told = interrupted();
    told.charges.clear();
    let streamed = End::Answered { status: 200, body: body("a"), replay: false };
    for end in [paid(1, "a"), End::NotKept, streamed] {
        told.operations[1].end = end;
        breaks(&told, AtMostOnce, &["I7"]);
    }
    told.operations[1].end = End::Answered { status: 402, body: body("a"), replay: false };
    breaks(&told, AtMostOnce, &[]);
}

#[test]
fn i8_refuses_an_effect_without_its_record_and_a_record_without_its_effect() {
    let holds = |state| {
        but(|it| {
            it.operations = vec![sent(1, End::Lost), sent(1, End::Mismatch)];
            it.sights.clear();
            it.held = [("k".to_owned(), held(1, 1_000, state))].into();
        })
    };
    for state in [State::Absent, State::Open] {
        for promise in [AtMostOnce, Deduplicated, Transactional] {
            breaks(&holds(state.clone()), promise, &["I8"]);
        }
    }
    // With leases an effect may be there before its answer; in a transaction never.
    for state in [State::Indeterminate, State::InFlight { until: 1_500 }] {
        breaks(&holds(state.clone()), AtMostOnce, &[]);
        breaks(&holds(state), Transactional, &["I8"]);
    }
    let without = |status| {
        let mut evidence = holds(State::Completed { status, body: None });
        evidence.charges.clear();
        evidence
    };
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        breaks(&without(201), promise, &["I8"]);
        breaks(&without(402), promise, &[]);
    }
}

#[test]
fn i9_refuses_an_answer_to_another_request() {
    for promise in [AtMostOnce, Deduplicated, Transactional] {
        breaks(&but(|it| it.operations[2] = sent(2, paid(1, "a"))), promise, &["I9"]);
    }
}

#[test]
fn l1_refuses_a_client_without_a_final_answer() {
    for end in [End::Lost, End::InUse, End::ComeBack, End::DidNothing] {
        breaks(&but(|it| it.operations.push(sent(1, end))), AtMostOnce, &["L1"]);
    }
    // Each request has a client of its own.
    breaks(&but(|it| it.operations.push(sent(2, End::Mismatch))), AtMostOnce, &[]);
    breaks(&but(|it| it.operations.push(sent(2, End::InUse))), AtMostOnce, &["L1"]);
    // "Unknown" is an answer where nobody settles it.
    breaks(&interrupted(), AtMostOnce, &[]);
    breaks(&interrupted(), Deduplicated, &["L1"]);
}

#[test]
fn an_effect_of_a_handler_that_nobody_told_of_is_a_fault_of_the_evidence() {
    breaks(&but(|it| it.runs.clear()), AtMostOnce, &["evidence"]);
}
