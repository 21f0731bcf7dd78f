//! A record as bytes: what is written is read, and nothing that is read makes it panic.

use super::*;

fn any_valid() -> impl Strategy<Value = Bytes> {
    any_record().prop_map(|record| record.encode())
}

proptest! {
    #[test]
    fn a_record_survives_its_own_bytes(record in any_record()) {
        let bytes = record.encode();
        prop_assert!(bytes.len() >= HEADER_LENGTH);
        prop_assert_eq!(Record::decode(bytes.clone()), Ok(record.clone()));
        prop_assert_eq!(Current::from_stored(Some(bytes)), Current::Present(record));
    }

    #[test]
    fn any_bytes_are_read_or_refused_without_a_panic(bytes: Vec<u8>) {
        let _ = Record::decode(bytes.into());
    }

    /// Whoever reads the header alone and whoever reads everything never disagree.
    #[test]
    fn a_header_that_is_read_alone_says_what_the_whole_record_says(
        record in any_record(),
        state in prop_oneof![4 => Just(None), 1 => (0_u8..7).prop_map(Some)],
        cut in prop_oneof![4 => Just(0_usize), 1 => 0..90_usize],
        more in prop_oneof![4 => Just(0_usize), 1 => 0..3_usize],
    ) {
        let mut bytes = record.encode().to_vec();
        if let Some(state) = state {
            bytes[1] = state;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        bytes.extend(vec![7; more]);
        let header = &bytes[..bytes.len().min(HEADER_LENGTH)];
        let sighting = Sighting::read(header, bytes.len());
        let whole = Record::decode(bytes.clone().into()).map(|record| record.sighting());
        prop_assert_eq!(sighting, whole);
    }

    #[test]
    fn any_bytes_behind_the_version_are_read_or_refused_and_read_back_the_same(
        state in 0_u8..7,
        rest in prop::collection::vec(any::<u8>(), 0..200),
        checkpoint_length in 0_u32..100,
    ) {
        let mut bytes = vec![1, state];
        bytes.extend(rest);
        if let Some(length) = bytes.get_mut(80..84) {
            length.copy_from_slice(&checkpoint_length.to_be_bytes());
        }
        if let Ok(record) = Record::decode(bytes.clone().into()) {
            // Only the lease of a record that is not in flight may hold anything: it is not read.
            let again = record.encode();
            if state == 1 || state == 5 {
                prop_assert_eq!(&again[..], &bytes[..]);
            }
            prop_assert_eq!(Record::decode(again), Ok(record));
        }
    }

    #[test]
    fn a_record_of_another_version_is_refused_whatever_follows(
        mut bytes in any_valid().prop_map(Vec::from),
        version: u8,
    ) {
        bytes[0] = version;
        let read = Record::decode(bytes.into());
        match version {
            1 => prop_assert!(read.is_ok()),
            _ => prop_assert_eq!(read, Err(Unreadable::Version)),
        }
    }

    #[test]
    fn a_state_that_is_none_is_damage(bytes in any_valid()) {
        for state in 0..=u8::MAX {
            let mut changed = bytes.to_vec();
            changed[1] = state;
            match Record::decode(changed.into()) {
                Ok(_) => prop_assert!((1..=5).contains(&state)),
                Err(unreadable) => {
                    prop_assert_eq!(unreadable, Unreadable::Damaged);
                    prop_assert_ne!(state, bytes[1]);
                }
            }
        }
    }

    #[test]
    fn a_record_that_was_cut_anywhere_is_refused(record in any_record()) {
        let bytes = record.encode();
        for length in 0..bytes.len() {
            prop_assert!(Record::decode(bytes.slice(..length)).is_err());
        }
    }

    #[test]
    fn bytes_behind_a_record_are_damage(record in any_record()) {
        let mut bytes = record.encode().to_vec();
        bytes.push(0);
        prop_assert_eq!(Record::decode(bytes.into()), Err(Unreadable::Damaged));
    }
}

#[test]
fn nothing_stored_is_absent_and_nothing_readable_is_unreadable() {
    assert_eq!(Current::from_stored(None), Current::Absent);
    let read = |bytes: &'static [u8]| Current::from_stored(Some(Bytes::from_static(bytes)));
    assert_eq!(read(b""), Current::Unreadable(Unreadable::Version));
    assert_eq!(read(b"PENDING"), Current::Unreadable(Unreadable::Version));
    assert_eq!(read(b"\x01"), Current::Unreadable(Unreadable::Damaged));
}

#[test]
fn a_checkpoint_and_an_answer_share_the_memory_of_what_was_read() {
    let record = Record {
        fingerprint: fingerprint(1, 1),
        holder: ME,
        attempt: Attempt::FIRST,
        fence: Fence::from_number(1),
        created: Millis(NOW),
        checkpoint: Bytes::from_static(b"noted"),
        state: State::Completed { at: Millis(NOW), response: Bytes::from_static(b"\x01answer") },
    };
    let bytes = record.encode();
    let within = bytes.as_ptr_range();
    let read = Record::decode(bytes).unwrap();
    assert!(within.contains(&read.checkpoint.as_ptr()));
    let State::Completed { response, .. } = read.state else { panic!("not completed") };
    assert!(within.contains(&response.as_ptr()));
}
