//! The protocol, explored to the end: one key, two servers, two clients that retry, and everything
//! that can go wrong between them, in every order.
//!
//! The store is the crate's own `record` on the bytes that a store keeps, so the model cannot drift
//! from the code. Each scenario says which invariants break in it, and fails if more or fewer do: a
//! promise that is not made must be seen to fail, or the model would be blind to it.
//!
//! CI runs each scenario with few faults and tries; `PROTOCOL_MODEL=full` runs them with more.
//! `--nocapture` prints the numbers of states. A failure prints a shortest way to each invariant that
//! was not to break.

#![allow(clippy::wildcard_enum_match_arm, reason = "an action that is named elsewhere")]
#![allow(unreachable_pub, reason = "a test program exports nothing")]

mod invariants;
mod step;
mod verbs;
mod world;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Instant;

use stateright::{Checker as _, Model as _};
use tower_idempotency::Effects;
use tower_idempotency::record::OnExpired;

use step::Protocol;
use world::{Budget, Downstream, OnError, Reconcile, Rules};

const NO_FAULTS: Budget = Budget {
    crash: 0,
    pause: 0,
    lost: 0,
    client_leaves: 0,
    handler_fails: 0,
    wipe: 0,
    retention: 0,
};

fn at_most_once(budget: Budget) -> Rules {
    Rules {
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
        downstream: Downstream::Plain,
        reconcile: Reconcile::Never,
        on_error: OnError::NotModelled,
        late_commands: false,
        twins_conflict: false,
        // As the engine does it: nothing will run again, so nothing can contradict the answer.
        answers_unstored: true,
        fresh_holder: false,
        acts_unmarked: false,
        judges_liveness: false,
        tries: [3, 2],
        mixed_requests: true,
        budget,
    }
}

fn at_least_once(budget: Budget) -> Rules {
    Rules { on_expired: OnExpired::Reexecute, answers_unstored: false, ..at_most_once(budget) }
}

fn reconciling(reconcile: Reconcile, downstream: Downstream, budget: Budget) -> Rules {
    let rules = at_most_once(budget);
    Rules { reconcile, downstream, answers_unstored: false, tries: [4, 2], ..rules }
}

fn is_full() -> bool {
    std::env::var("PROTOCOL_MODEL").is_ok_and(|size| size == "full")
}

/// The smaller budget in CI, the greater one in full runs.
fn sized(small: Budget, full: Budget) -> Budget {
    if is_full() { full } else { small }
}

/// Explores a scenario, and compares what breaks and what is reached with what is stated.
fn explore(name: &str, mut rules: Rules, breaks: &[&str], reaches: &[&str]) {
    if !is_full() && !rules.judges_liveness {
        rules.tries = rules.tries.map(|tries| tries.min(3));
    }
    let began = Instant::now();
    let protocol = Protocol { rules: rules.clone(), only: None, reached: Mutex::default() };
    let checker = protocol.checker().threads(1).spawn_bfs().join();
    let broken: Vec<_> =
        invariants::NAMES.into_iter().filter(|name| checker.discovery(name).is_some()).collect();
    println!(
        "{name}: {} states, depth {}, {:.1} s, breaks {broken:?}",
        checker.unique_state_count(),
        checker.max_depth(),
        began.elapsed().as_secs_f64()
    );
    for &invariant in broken.iter().filter(|invariant| !breaks.contains(invariant)) {
        // Asked for alone, the first path that is found is a shortest one.
        let protocol =
            Protocol { rules: rules.clone(), only: Some(invariant), reached: Mutex::default() };
        let checker = protocol.checker().threads(1).spawn_bfs().join();
        let path = checker.discovery(invariant).expect("it was found before");
        println!("  {invariant}: {:?}", path.into_actions());
    }
    assert_eq!(broken, breaks, "{name}: more or fewer invariants break than stated");
    let reached: BTreeSet<_> =
        checker.model().reached.lock().expect("no holder panics").iter().copied().collect();
    for what in reaches {
        assert!(reached.contains(what), "{name}: {what:?} was never reached, only {reached:?}");
    }
}

#[test]
fn r1_lost_replies_break_nothing() {
    let budget = Budget { lost: 2, client_leaves: 1, handler_fails: 1, ..NO_FAULTS };
    let small = Budget { handler_fails: 0, ..budget };
    explore("r1", at_most_once(sized(small, budget)), &[], &["replay", "mismatch"]);
}

#[test]
fn r2_running_again_after_a_crash_may_act_twice() {
    let rules = at_least_once(Budget { crash: 1, ..NO_FAULTS });
    explore("r2", rules, &["I1"], &["takeover", "replay"]);
}

#[test]
fn r3_running_again_after_a_pause_may_act_twice_at_once() {
    let rules = at_least_once(Budget { pause: 1, client_leaves: 1, ..NO_FAULTS });
    explore("r3", rules, &["I1", "I5"], &["takeover", "refused completion", "superseded"]);
}

#[test]
fn r4_at_most_once_holds_under_crashes_pauses_and_lost_replies() {
    let small = Budget { crash: 1, pause: 1, lost: 1, handler_fails: 1, ..NO_FAULTS };
    let full = Budget { crash: 2, pause: 2, client_leaves: 1, ..small };
    explore("r4", at_most_once(sized(small, full)), &[], &["unknown", "healed", "replay"]);
}

#[test]
fn r5_at_most_once_holds_where_twins_are_told_at_once() {
    let small = Budget { crash: 1, pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { client_leaves: 1, handler_fails: 1, ..small };
    let rules = Rules { twins_conflict: true, ..at_most_once(sized(small, full)) };
    explore("r5", rules, &[], &["unknown", "healed"]);
}

#[test]
fn r6_at_most_once_holds_when_commands_arrive_late() {
    let small = Budget { pause: 1, lost: 1, handler_fails: 1, ..NO_FAULTS };
    let full = Budget { crash: 1, lost: 2, client_leaves: 1, ..small };
    let rules = Rules {
        late_commands: true,
        on_error: OnError::MarkUnknown,
        ..at_most_once(sized(small, full))
    };
    let reaches = ["late command", "unknown", "unknown although nothing happened"];
    explore("r6", rules, &[], &reaches);
}

#[test]
fn r7_a_downstream_that_deduplicates_makes_running_again_safe() {
    let small = Budget { crash: 1, pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { lost: 2, client_leaves: 1, ..small };
    let rules = Rules {
        downstream: Downstream::Deduplicates,
        late_commands: true,
        ..at_least_once(sized(small, full))
    };
    explore("r7", rules, &["I5"], &["takeover", "late command", "superseded"]);
}

#[test]
fn r8_a_fence_alone_does_not_make_running_again_safe() {
    let rules = Rules {
        downstream: Downstream::Fences,
        ..at_least_once(Budget { crash: 1, pause: 1, ..NO_FAULTS })
    };
    explore("r8", rules, &["I1", "I5"], &["takeover", "fenced out"]);
}

#[test]
fn r9_a_hook_that_only_looks_is_beaten_by_a_paused_handler() {
    let small = Budget { pause: 1, client_leaves: 1, ..NO_FAULTS };
    let full = Budget { crash: 1, ..small };
    let rules = reconciling(Reconcile::Looks, Downstream::Plain, sized(small, full));
    // The opened key takes another request as well; with one more fault, even its client may be given
    // what the first one did.
    let breaks: &[&str] = if is_full() { &["I1", "I5", "I6", "I9"] } else { &["I1", "I5", "I6"] };
    explore("r9", rules, breaks, &["resolved", "changed before it was resolved"]);
}

#[test]
fn r10_a_hook_that_fences_first_is_not() {
    let small = Budget { pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { crash: 1, pause: 2, client_leaves: 1, ..small };
    let rules = reconciling(Reconcile::FencesThenLooks, Downstream::Fences, sized(small, full));
    explore("r10", rules, &["I5"], &["resolved", "fenced out"]);
}

#[test]
fn r11_at_most_once_every_client_ends_with_an_answer() {
    let small = Budget { crash: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { pause: 1, client_leaves: 1, ..small };
    let rules = Rules {
        judges_liveness: true,
        mixed_requests: false,
        tries: if is_full() { [6, 6] } else { [4, 4] },
        ..at_most_once(sized(small, full))
    };
    explore("r11", rules, &[], &["unknown"]);
}

#[test]
fn r12_with_deduplication_every_client_ends_with_the_one_success() {
    let small = Budget { crash: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { pause: 1, client_leaves: 1, ..small };
    let rules = Rules {
        downstream: Downstream::Deduplicates,
        judges_liveness: true,
        mixed_requests: false,
        tries: if is_full() { [6, 6] } else { [4, 4] },
        ..at_least_once(sized(small, full))
    };
    explore("r12", rules, if is_full() { &["I5"] } else { &[] }, &["takeover"]);
}

#[test]
fn x1_marked_effects_happen_once_and_a_death_before_the_mark_frees_the_key() {
    let small = Budget { crash: 1, pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { crash: 2, handler_fails: 1, client_leaves: 1, ..small };
    let rules = Rules { effects: Effects::Marked, ..at_most_once(sized(small, full)) };
    // A paused handler and its successor may both run; only one gets past its mark.
    explore("x1", rules, &["I5"], &["stopped at its mark", "unknown"]);
}

#[test]
fn x2_marked_effects_happen_once_although_panics_free_the_key() {
    let small = Budget { pause: 1, handler_fails: 2, ..NO_FAULTS };
    let full = Budget { crash: 1, lost: 1, ..small };
    let rules = Rules {
        effects: Effects::Marked,
        on_error: OnError::MarkUnknown,
        ..at_most_once(sized(small, full))
    };
    explore("x2", rules, &["I5"], &["unknown"]);
}

#[test]
fn x3_a_handler_that_acts_before_its_mark_may_act_twice() {
    let rules = Rules {
        effects: Effects::Marked,
        acts_unmarked: true,
        ..at_most_once(Budget { crash: 1, ..NO_FAULTS })
    };
    explore("x3", rules, &["I1"], &["replay"]);
}

#[test]
fn x4_marked_effects_with_deduplication_hold_where_runs_may_repeat() {
    let small = Budget { crash: 1, pause: 1, handler_fails: 1, ..NO_FAULTS };
    let full = Budget { lost: 1, ..small };
    let rules = Rules {
        effects: Effects::Marked,
        downstream: Downstream::Deduplicates,
        ..at_least_once(sized(small, full))
    };
    explore("x4", rules, &["I5"], &["takeover", "stopped at its mark"]);
}

#[test]
fn m4_answering_what_was_not_stored_contradicts_a_later_run() {
    let rules = Rules { answers_unstored: true, ..at_least_once(Budget { lost: 1, ..NO_FAULTS }) };
    explore("m4", rules, &["I1", "I2"], &["takeover"]);
}

#[test]
fn m6_another_holder_for_a_repeated_claim_waits_for_itself() {
    let rules = Rules {
        fresh_holder: true,
        mixed_requests: false,
        ..at_most_once(Budget { lost: 1, ..NO_FAULTS })
    };
    explore("m6", rules, &[], &["unknown although nothing happened"]);
}

#[test]
fn m7_freeing_the_key_after_an_error_acts_twice() {
    let rules = Rules {
        on_error: OnError::Release,
        ..at_most_once(Budget { handler_fails: 1, ..NO_FAULTS })
    };
    explore("m7", rules, &["I1", "I6"], &["replay"]);
}

#[test]
fn m8_a_stored_error_is_one_answer() {
    let small = Budget { handler_fails: 1, pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { crash: 1, ..small };
    let rules = Rules { on_error: OnError::Store, ..at_most_once(sized(small, full)) };
    explore("m8", rules, &[], &["replay", "unknown"]);
}

#[test]
fn m9_an_error_that_leaves_the_outcome_unknown_breaks_nothing() {
    let small = Budget { handler_fails: 1, pause: 1, lost: 1, ..NO_FAULTS };
    let full = Budget { crash: 1, ..small };
    let rules = Rules { on_error: OnError::MarkUnknown, ..at_most_once(sized(small, full)) };
    explore("m9", rules, &[], &["unknown"]);
}

#[test]
fn f7_a_store_that_forgets_ends_the_promises_but_answers_nobody_with_anothers_answer() {
    let rules = at_most_once(Budget { wipe: 1, client_leaves: 1, ..NO_FAULTS });
    let broken = ["I1", "I2", "I3", "I4", "I5", "I6"];
    explore("f7", rules, &broken, &["restored", "restored by renewal", "refused completion"]);
}

#[test]
fn f8_a_duplicate_after_the_retention_is_a_new_operation() {
    let rules = at_most_once(Budget { retention: 1, ..NO_FAULTS });
    explore("f8", rules, &["I1", "I2", "I3", "I6"], &["replay"]);
}
