#!lua flags=allow-oom
--[[ Stores a large response that waits under a key beside the record, and ends the lease.
     One script, because only the last holder may write, and only while nobody has taken over.
     The response never passes through Lua, which would copy it twice: its key is renamed.
     It may exceed maxmemory: the effect has happened, and losing its answer helps nobody.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  KEYS[2]  beside     (string: 84 bytes that are overwritten here, then the response)
  ARGV[1]  owner      (68 bytes: recipe id and digest 36, holder 16, attempt 4, fence 6, created 6, as in the record)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  accepted   (up to 3 times 36 bytes: recipe id and digest by older recipes)
  Returns  1 stored
         | 2 healed
         | 3 restored
         | 4 superseded, response
         | 5 mismatch
         | 6 lost
         | 7 unreadable
         | 8 nothing beside
]]
local time = redis.call('TIME')
local key, beside = KEYS[1], KEYS[2]
local owner, retention = ARGV[1], ARGV[2]

local sub = string.sub
local micros = time[2] + 0
local now = time[1] * 1000 + (micros - micros % 1000) / 1000
local size = redis.call('STRLEN', beside)
if size < 85 then return {8} end
-- A checkpoint is for a later attempt, and there will be none: its length is 0 from here on.
local ended = struct.pack('>I6I4I4', now, size - 84, 0)

local record = redis.call('GETRANGE', key, '0', '83')
local length = redis.call('STRLEN', key)
-- A string with nothing in it is no record, but it is there.
local absent = record == '' and redis.call('EXISTS', key) == 0
local state
if not absent then
  local version, granted, noted
  version, state = string.byte(record, 1, 2)
  local known = version == 1 and length >= 84 and state >= 1 and state <= 5
  if known then
    granted, noted = struct.unpack('>I4I4', record, 77)
    known = length - 84 - noted == (state == 4 and math.max(granted, 1) or 0)
  end
  if not known then
    redis.call('UNLINK', beside)
    return {7}
  end

  local mine = sub(record, 39, 54) == sub(owner, 37, 52)
  if state == 4 then
    local first, same, recipe = 84 + noted, false, sub(record, 3, 6)
    local prints = sub(owner, 1, 36) .. ARGV[3]
    for i = 1, #prints, 36 do
      if sub(prints, i, i + 3) == recipe then
        same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)
        break
      end
    end
    local stored = (mine or same) and redis.call('GETRANGE', key, first, -1)
    local again = mine and stored == redis.call('GETRANGE', beside, '84', '-1')
    redis.call('UNLINK', beside)
    if again then
      -- Written again: a WAIT that follows waits for writes of its own connection only.
      redis.call('SETRANGE', key, '0', '\1')
      return {1}
    end
    if mine then return {6} end
    if same then return {4, stored} end
    return {5}
  end
  if not mine or state == 2 then
    redis.call('UNLINK', beside)
    return {6}
  end
end

-- The record is replaced by the last command: one that fails before leaves the record as it was.
local head = absent and '\1\4' .. owner .. ended or '\1\4' .. sub(record, 3, 70) .. ended
redis.call('SETRANGE', beside, '0', head)
-- The key brings its expiry along, which was short.
redis.call('PEXPIRE', beside, retention)
redis.call('RENAME', beside, key)
if absent then return {3} end
if state == 3 then return {2} end
return {1}
