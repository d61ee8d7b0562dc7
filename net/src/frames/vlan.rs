// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VLANs: the VLAN of an incoming frame, whether it may leave by a port, and with which tag (IEEE 802.1Q).
//!
//! A frame that is on a VLAN has no tag or exactly one, and leaves with none or exactly one: the switch's own, of type
//! 0x8100. Frames with several tags, or with a tag of another type, pass between transparent ports only, as they are.

use crate::frames::headers::Headers;
use crate::policy::port::{Policy, Vlan};

const VID: u16 = 0xfff;

/// The VLAN that a frame is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VlanTag {
    /// Its number, if the switch has parsed the tag.
    pub vid: Option<u16>,
    /// The priority (and drop eligibility) of its tag, in place.
    pub priority: u16,
    /// It came by a transparent port, and leaves unchanged by others of that kind.
    pub open: bool,
}

impl VlanTag {
    /// Of a frame whose tags were not parsed.
    pub const OPEN: VlanTag = VlanTag { vid: None, priority: 0, open: true };
}

/// The tag with which a frame leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    Keep,
    /// Without a tag.
    Bare,
    /// With this one only: priority and VLAN number.
    Tag(u16),
}

/// Returns the VLAN of a frame that a port sends. None: not one of the port's.
#[must_use]
pub fn enter(policy: &Policy, headers: &Headers) -> Option<VlanTag> {
    let tag = headers.only_tag();
    let priority = tag.unwrap_or(0) & !VID;
    // A tag of VLAN 0 only carries a priority.
    let real = tag.map(|t| t & VID).filter(|vid| *vid != 0);
    if policy.vlan == Vlan::Transparent {
        return Some(VlanTag { vid: real.filter(|_| policy.uplink), priority, open: true });
    }
    if headers.tags > 0 && tag.is_none() {
        return None;
    }
    let vid = match (&policy.vlan, real) {
        (Vlan::Access(own), None) => *own,
        (Vlan::Trunk { native, .. }, None) => (*native)?,
        (Vlan::Trunk { vlans, .. }, Some(vid)) if vlans.contains(&vid) => vid,
        _ => return None,
    };
    Some(VlanTag { vid: Some(vid), priority, open: false })
}

/// Returns how a frame on `tag` leaves by this port; None: it may not.
#[must_use]
pub fn leave(policy: &Policy, tag: VlanTag) -> Option<Edit> {
    let tagged = |vid| Edit::Tag(tag.priority | vid);
    match (&policy.vlan, tag.vid) {
        (Vlan::Transparent, _) if tag.open => Some(Edit::Keep),
        (Vlan::Transparent, vid) => vid.filter(|_| policy.uplink).map(tagged),
        (Vlan::Access(own), vid) => (vid == Some(*own)).then_some(Edit::Bare),
        (Vlan::Trunk { native, .. }, Some(vid)) if *native == Some(vid) => Some(Edit::Bare),
        (Vlan::Trunk { vlans, .. }, Some(vid)) => vlans.contains(&vid).then(|| tagged(vid)),
        (Vlan::Trunk { .. }, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::headers::TPID_VLAN;

    fn headers(tags: &[(u16, u16)]) -> Headers {
        let mut h = vec![0; 12];
        for (tpid, tci) in tags {
            h.extend(tpid.to_be_bytes());
            h.extend(tci.to_be_bytes());
        }
        h.extend([0x88, 0xb5]);
        Headers::parse(&h, 60)
    }

    fn port(vlan: Vlan) -> Policy {
        Policy { vlan, ..Policy::default() }
    }

    fn way(from: &Policy, vid: Option<u16>, to: &Policy) -> Option<Edit> {
        let tags: Vec<_> = vid.map(|v| (TPID_VLAN, v)).into_iter().collect();
        leave(to, enter(from, &headers(&tags))?)
    }

    #[test]
    fn frames_stay_on_their_vlan_and_tags_are_put_in_and_taken_out() {
        let (a5, a6) = (port(Vlan::Access(5)), port(Vlan::Access(6)));
        let trunk = port(Vlan::Trunk { vlans: vec![5, 7], native: Some(6) });
        let open = port(Vlan::Transparent);
        let uplink = Policy { uplink: true, ..Policy::default() };
        assert_eq!(way(&a5, None, &a5), Some(Edit::Bare));
        assert_eq!(way(&a5, None, &a6), None);
        assert_eq!(way(&a5, Some(6), &a6), None, "no hopping by a tag of one's own");
        assert_eq!(way(&a5, Some(5), &a5), None);
        assert_eq!(way(&a5, Some(0), &a5), Some(Edit::Bare), "a priority tag");
        assert_eq!(way(&a5, None, &trunk), Some(Edit::Tag(5)));
        assert_eq!(way(&a6, None, &trunk), Some(Edit::Bare), "native");
        assert_eq!(way(&trunk, Some(5), &a5), Some(Edit::Bare));
        assert_eq!(way(&trunk, None, &a6), Some(Edit::Bare));
        assert_eq!(way(&trunk, Some(8), &a5), None);
        assert_eq!(way(&trunk, Some(7), &trunk), Some(Edit::Tag(7)));
        assert_eq!(way(&open, None, &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(9), &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(5), &a5), None, "a transparent port can't enter a VLAN");
        assert_eq!(way(&a5, None, &open), None);
        assert_eq!(way(&a5, None, &uplink), Some(Edit::Tag(5)));
        assert_eq!(way(&uplink, Some(5), &a5), Some(Edit::Bare));
        assert_eq!(way(&uplink, None, &a5), None);
        assert_eq!(way(&uplink, None, &open), Some(Edit::Keep));
        assert_eq!(way(&uplink, Some(5), &open), Some(Edit::Keep));
        assert_eq!(way(&open, Some(5), &uplink), Some(Edit::Keep));
    }

    #[test]
    fn a_frame_with_several_tags_or_a_foreign_one_is_on_no_vlan() {
        let trunk = port(Vlan::Trunk { vlans: vec![5, 6], native: Some(7) });
        let uplink = Policy { uplink: true, ..Policy::default() };
        for tags in
            [&[(0x8100, 0), (0x8100, 6)][..], &[(0x8100, 5), (0x8100, 6)], &[(0x88a8, 5)], &[(0x8100, 5); 3]]
        {
            let h = headers(tags);
            assert_eq!(enter(&port(Vlan::Access(5)), &h), None, "{tags:x?}");
            assert_eq!(enter(&trunk, &h), None, "{tags:x?}");
            // A frame from outside passes among transparent ports.
            let tag = enter(&uplink, &h).unwrap();
            assert_eq!(leave(&port(Vlan::Access(5)), tag), None);
            assert_eq!(leave(&trunk, tag), None);
            assert_eq!(leave(&port(Vlan::Transparent), tag), Some(Edit::Keep));
        }
        let urgent = enter(&port(Vlan::Access(5)), &headers(&[(0x8100, 0xa000)])).unwrap();
        assert_eq!(leave(&trunk, urgent), Some(Edit::Tag(0xa005)), "a priority stays");
    }
}
